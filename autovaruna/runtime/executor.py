"""Executes a schedule on one rank: one short method an instruction, and a dict that joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from autovaruna.graph.kept_whole.kept import forgetting
from autovaruna.graph.origin import failed_at
from autovaruna.graph.pieces.weight_gradients import Deferred
from autovaruna.graph.random import RandomStream
from autovaruna.runtime.arrival import arrive, go_backward
from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.changed_state import ChangedState
from autovaruna.runtime.given_whole import given_whole
from autovaruna.runtime.in_flight import NOTHING, InFlight
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.offload import Stash
from autovaruna.runtime.own_samples import OwnSamples
from autovaruna.runtime.posting import Posting
from autovaruna.runtime.recorder import Recorder
from autovaruna.runtime.traffic import Act, Traffic
from autovaruna.runtime.worlds.world import World
from autovaruna.schedule.instruction import Kind
from autovaruna.stage.module import StageModule

Place = tuple[int, int]
"""A stage and a micro-batch."""


class Executor:
    """Runs the instructions of one rank for one job.

    Args:
        job: The call.
        world: The ranks.
        mail: Carries tensors.
        traffic: Knows what each instruction receives and sends.
        stages: The stages that this rank holds, by index.
        inputs: This rank's mini-batch, by input name.
        device: Where it computes.
        recorder: Notes when instructions ran.

    `output_gradients` gives the gradient of output `place` for a micro-batch; a loss has its share. `stage_ended` hears
    of each stage whose last gradients on this rank are there, or that has none. `aside` is what else a step has to do
    before its first backward: it is called while this rank waits for the first time, or then at the latest.
    `keeps_graphs` says whether the same backwards may run again.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        mail: Mail,
        traffic: Traffic,
        stages: Mapping[int, StageModule],
        inputs: Mapping[str, Tensor],
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self._job = job
        self._world = world
        self._mail = mail
        self._stages = stages
        self._samples = OwnSamples(inputs, job, world.rank, mail)
        self._device = device
        self._recorder = recorder
        self._in_flight: dict[Place, InFlight] = {}
        self._deferred: dict[Place, Deferred] = {}
        self._state = ChangedState(job.split.traced, len(job.batch.micro_batches))
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.input_gradients: dict[tuple[str, int], Tensor | None] = {}
        self.output_gradients: Callable[[int, MicroBatch], Tensor | None] = _no_gradient
        self.stage_ended: Callable[[int], None] = lambda stage: None
        self.aside: Callable[[], None] | None = None
        self.keeps_graphs = False
        self._traffic = traffic
        self._act: Act | None = None

    def send_inputs(self) -> None:
        """Starts to send this rank's samples to the stages that use them."""
        self._samples.send(self._traffic.handed_out)

    def run(self, program: Sequence[Act]) -> None:
        """Executes instructions in order."""
        posting = Posting(program, self._mail)
        idle = set(self._stages)
        self._mail.while_waiting = partial(self._while_waiting, posting)
        with torch.set_grad_enabled(self._job.needs_gradient):
            posting.go_to(0, ahead=0)  # more once the first instruction has ended: others wait for what it sends
            for position, act in enumerate(program, 1):
                self._act = act
                if self._recorder is None:
                    _METHODS[act.instruction.kind](self, self._stages[act.instruction.stage], act)
                else:
                    self._recorded(self._recorder, act)
                if act.ends_stage:
                    idle.discard(act.instruction.stage)
                    self.stage_ended(act.instruction.stage)
                if position >= posting.due:
                    posting.go_to(position)
                self._world.glance()
        self._mail.while_waiting = None
        self._turn_aside()
        for stage in idle:
            self.stage_ended(stage)
        self.output_gradients = _no_gradient  # its owner may own this executor: no cycle keeps tensors after the step

    def _while_waiting(self, posting: Posting) -> None:
        posting.go_ahead()
        self._turn_aside()

    def _turn_aside(self) -> None:
        if self.aside is not None:
            aside, self.aside = self.aside, None
            aside()

    def _recorded(self, recorder: Recorder, act: Act) -> None:
        """Executes an instruction and notes when."""
        begin, waited = perf_counter(), self._mail.waited_seconds
        _METHODS[act.instruction.kind](self, self._stages[act.instruction.stage], act)
        recorder.noted.append((act.instruction, begin, perf_counter(), self._mail.waited_seconds - waited))

    def where(self, error: BaseException) -> str:
        """Returns rank, stage and micro-batch, and the line of the user's model if an operation raised `error`."""
        if self._act is None:
            return f"rank {self._world.rank}, before the first instruction"
        part = self._act.part
        owner = "" if len(self._job.batch.groups) == 1 else f" of rank {part.origin}"
        samples = f"samples {part.start} to {part.start + part.size - 1}{owner}"
        place = f"rank {self._world.rank}, stage {self._act.instruction.stage}, micro-batch {part.index} ({samples})"
        traced = self._job.split.traced
        line = failed_at(error, traced.nodes)
        return place + line + (given_whole(traced.inputs.values(), part, self._job.batch) if line else "")

    def _forward(self, stage: StageModule, act: Act) -> None:
        """Waits for inputs and activations, runs the stage, starts to send what it returns."""
        part = act.part
        state = InFlight(self._arrived(act))
        if self._state.is_steady:
            self._state.start_alike(stage)
        keeps_graph = self._job.needs_gradient and stage.index not in self._job.recomputing
        if self._job.needs_gradient and not keeps_graph:
            state.before = self._state.copy(stage)
        returned = self._run_stage(stage, part, state, keeps_graph)
        for kind, names in act.sends:
            self._mail.send([returned[name].detach() for name in names], kind)
        for place, name in stage.part.outputs:
            self.outputs[place, part.index] = _alone(returned[name])
        if keeps_graph:
            state.returned = returned
        elif self._job.needs_gradient:
            state.stash = Stash(state.tensors, is_offloaded=self._job.offload)
        state.tensors = NOTHING
        if self._job.needs_gradient:
            self._in_flight[stage.index, part.index] = state

    def _recompute(self, stage: StageModule, act: Act) -> None:
        """Runs the forward of a micro-batch again, from the same state and with the same random numbers."""
        state = self._in_flight[stage.index, act.part.index]
        assert state.stash is not None, "a stage that recomputes has kept what it received"
        state.tensors = state.stash.take()
        if self.keeps_graphs:
            state.stash = Stash(state.tensors, is_offloaded=self._job.offload)
        with self._state.as_before(stage, state.before):
            state.returned = self._run_stage(stage, act.part, state, keeps_graph=True)
        state.tensors = NOTHING

    def _backward(self, stage: StageModule, act: Act) -> None:
        """Waits for gradients, runs backward, starts to send the gradients of what the stage received."""
        place = stage.index, act.part.index
        state = self._in_flight[place]
        is_kept = self.keeps_graphs and stage.index not in self._job.recomputing
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for name, gradient in self._arrived_gradients(stage, act):
            if gradient is not None and (root := state.returned[name]).requires_grad:
                roots.append(root)
                gradients.append(gradient)
        if not is_kept:
            state.returned = NOTHING
        if not self.keeps_graphs:
            del self._in_flight[place]
        if roots:
            go_backward(roots, gradients, is_kept)
        if state.deferred is not None:
            self._deferred[place] = state.deferred
        for kind, names in act.sends:
            self._mail.send(list(map(state.gradients.get, names)), kind)
        for name, holder in self._job.split.input_gradients.items():
            if holder == stage.index:
                self.input_gradients[name, act.part.index] = state.gradients.get(name)
        state.gradients.clear()

    def _weights(self, stage: StageModule, act: Act) -> None:
        """Computes the weight gradients that the backward has left."""
        stage.compute_weights(self._deferred.pop((stage.index, act.part.index)))

    def _run_stage(self, stage: StageModule, part: MicroBatch, state: InFlight, keeps_graph: bool) -> dict[str, Tensor]:
        job = self._job
        stream = RandomStream(job.seed, job.step, part.index, self._device) if stage.is_random else None
        tensors = self._leaves(stage, state) if job.needs_gradient else state.tensors
        if job.of_batch:
            tensors = {**tensors, **job.of_batch.get(part.share, NOTHING)}
        if job.needs_gradient and not keeps_graph:
            with forgetting():
                return stage.run(tensors, part.size, stream)
        if keeps_graph and stage.index in job.splitting:
            state.deferred = Deferred()
        return stage.run(tensors, part.size, stream, state.deferred)

    def _leaves(self, stage: StageModule, state: InFlight) -> Mapping[str, Tensor]:
        """Turns what the stage received into leaves whose gradients are noted in `state`."""
        tensors = dict(state.tensors)
        for name in self._traffic.wanted[stage.index]:
            if name in tensors:
                tensors[name] = arrive(tensors[name], state.gradients, name)
        return tensors

    def _arrived(self, act: Act) -> dict[str, Tensor]:
        """Returns all that a forward receives, by name."""
        tensors: dict[str, Tensor] = {}
        for name in act.own:  # first what is here: the rest may still be on its way
            tensors[name] = self._samples.of(act.part, name)
        for kind, names in act.receives:
            for name, tensor in zip(names, self._mail.take(kind), strict=True):
                assert tensor is not None, f"{name} is always there; gradients alone may be missing"
                tensors[name] = tensor
        return tensors

    def _arrived_gradients(self, stage: StageModule, act: Act) -> list[tuple[str, Tensor | None]]:
        """Returns the gradients of what a stage returns: of the model's outputs first, then of what it sent."""
        arrived: list[tuple[str, Tensor | None]] = []
        for kind, names in act.receives:
            arrived += zip(names, self._mail.take(kind), strict=True)
        if self.aside is not None:
            self._turn_aside()  # not before: what came meanwhile would count as work of this instruction
        own: list[tuple[str, Tensor | None]] = []
        for place, name in stage.part.outputs:
            own.append((name, self.output_gradients(place, act.part)))
        return own + arrived


_METHODS: dict[Kind, Callable[[Executor, StageModule, Act], None]] = {
    Kind.FORWARD: Executor._forward,
    Kind.RECOMPUTE: Executor._recompute,
    Kind.BACKWARD: Executor._backward,
    Kind.WEIGHT: Executor._weights,
}


def _alone(output: Tensor) -> Tensor:
    """Returns an output without its graph, and without memory of more: torch leaves a mean in that of its terms."""
    output = output.detach()
    is_one_number = output.numel() == 1  # to copy it takes less than to look
    return output.clone() if is_one_number or output.untyped_storage().nbytes() > 2 * output.nbytes else output


def _no_gradient(place: int, part: MicroBatch) -> Tensor | None:
    return None
