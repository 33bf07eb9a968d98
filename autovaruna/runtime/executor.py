"""Executes a schedule on one rank: one short method an instruction, and a dict that joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from autovaruna.graph.kept import forgetting
from autovaruna.graph.origin import failed_at
from autovaruna.graph.random import RandomStream
from autovaruna.graph.weight_gradients import Deferred
from autovaruna.runtime.arrival import arrive, go_backward
from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.events import Recorder
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.offload import Stash
from autovaruna.runtime.posting import Posting
from autovaruna.runtime.traffic import Traffic
from autovaruna.runtime.world import Pending, World
from autovaruna.schedule.instruction import Instruction, Kind
from autovaruna.stage.module import StageModule

Place = tuple[int, int]
"""A stage and a micro-batch."""


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    tensors: dict[str, Tensor]
    returned: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    stash: Stash | None = None
    deferred: Deferred | None = None


class Executor:
    """Runs the instructions of one rank for one job.

    Args:
        job: The call.
        world: The ranks.
        mail: Carries tensors.
        stages: The stages that this rank holds, by index.
        inputs: This rank's mini-batch, by input name.
        device: Where it computes.
        recorder: Notes when instructions ran.

    `output_gradients` gives the gradient of output `place` for a micro-batch; a loss has its share. `stage_ended` hears
    of each stage whose last gradients on this rank are there, or that has none.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        mail: Mail,
        stages: Mapping[int, StageModule],
        inputs: Mapping[str, Tensor],
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self._job = job
        self._world = world
        self._mail = mail
        self._stages = stages
        self._inputs = {name: tensor.detach() for name, tensor in inputs.items()}
        self._device = device
        self._recorder = recorder
        self._in_flight: dict[Place, _InFlight] = {}
        self._deferred: dict[Place, Deferred] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.input_gradients: dict[tuple[str, int], Tensor | None] = {}
        self.output_gradients: Callable[[int, MicroBatch], Tensor | None] = _no_gradient
        self.stage_ended: Callable[[int], None] = lambda stage: None
        self._traffic = Traffic(job, world.rank, mail)
        self._wanted = {stage: self._names_of_leaves(stage) for stage in stages}
        self._sent_inputs: list[Pending] = []
        self._instruction: Instruction | None = None
        self._batch_inputs = job.split.traced.batch_inputs

    @property
    def origin(self) -> str:
        """Names the outputs that have a gradient, where calls differ in that: then messages back differ, too."""
        return self._traffic.origin

    @origin.setter
    def origin(self, origin: str) -> None:
        self._traffic.origin = origin

    def send_inputs(self) -> None:
        """Starts to send this rank's samples to the stages that use them."""
        for part in self._job.batch.owned_by(self._world.rank):
            for stage in self._job.split.stages if part.origin == self._world.rank else ():
                destination = self._job.rank_of(stage.index, part.index)
                names = self._traffic.travelling(stage.index)
                if names and not self._job.batch.has(destination, part):
                    tensors = [self._slice(name, part) for name in names]
                    self._sent_inputs.append(self._mail.send(tensors, self._traffic.inputs(stage.index, part)))

    def let_go_of_inputs(self) -> None:
        """Waits until this rank's samples have left it: the caller may change them after the call."""
        for pending in self._sent_inputs:
            pending.wait()
        self._sent_inputs = []

    def run(self, program: Sequence[Instruction]) -> None:
        """Executes instructions in order."""
        posting = Posting(program, self._job, self._mail, self._traffic)
        last = {step.stage: place for place, step in enumerate(program) if step.kind in (Kind.BACKWARD, Kind.WEIGHT)}
        for position, instruction in enumerate(program):
            posting.go_to(position)
            part = self._job.batch.micro_batches[instruction.micro_batch]
            self._instruction = instruction
            begin, waited = perf_counter(), self._mail.waited_seconds
            _METHODS[instruction.kind](self, self._stages[instruction.stage], part)
            if self._recorder is not None:
                self._recorder.note(instruction, begin, perf_counter(), self._mail.waited_seconds - waited)
            if last.get(instruction.stage) == position:
                self.stage_ended(instruction.stage)
            self._world.progress()
        for stage in self._stages.keys() - last.keys():
            self.stage_ended(stage)
        self.output_gradients = _no_gradient  # its owner may own this executor: no cycle keeps tensors after the step

    def where(self, error: BaseException) -> str:
        """Returns rank, stage and micro-batch, and the line of the user's model if an operation raised `error`."""
        if self._instruction is None:
            return f"rank {self._world.rank}, before the first instruction"
        part = self._job.batch.micro_batches[self._instruction.micro_batch]
        owner = "" if len(self._job.batch.groups) == 1 else f" of rank {part.origin}"
        samples = f"samples {part.start} to {part.start + part.size - 1}{owner}"
        place = f"rank {self._world.rank}, stage {self._instruction.stage}, micro-batch {part.index} ({samples})"
        return place + failed_at(error, self._job.split.traced.nodes)

    def _forward(self, stage: StageModule, part: MicroBatch) -> None:
        """Waits for inputs and activations, runs the stage, starts to send what it returns."""
        state = _InFlight(self._arrived(stage, part))
        keeps_graph = self._job.needs_gradient and not self._recomputes(stage.index)
        if self._job.needs_gradient and not keeps_graph:
            changed = stage.changed_state(self._job.split.traced.changed_state)
            state.before = {name: tensor.clone() for name, tensor in changed.items()}
        returned = self._run_stage(stage, part, state, keeps_graph)
        for edge in stage.part.leaving:
            self._mail.send([returned[name].detach() for name in edge.values], self._traffic.activations(edge, part))
        for place, name in stage.part.outputs:
            self.outputs[place, part.index] = _alone(returned[name])
        if keeps_graph:
            state.returned = returned
        elif self._job.needs_gradient:
            state.stash = Stash(state.tensors, is_offloaded=self._job.offload)
        state.tensors = {}
        if self._job.needs_gradient:
            self._in_flight[stage.index, part.index] = state

    def _recompute(self, stage: StageModule, part: MicroBatch) -> None:
        """Runs the forward of a micro-batch again, from the same state and with the same random numbers."""
        state = self._in_flight[stage.index, part.index]
        changed = stage.changed_state(self._job.split.traced.changed_state)
        now = {name: tensor.clone() for name, tensor in changed.items()}
        _overwrite(changed, state.before)
        assert state.stash is not None, "a stage that recomputes has kept what it received"
        state.tensors = state.stash.take()
        state.returned = self._run_stage(stage, part, state, keeps_graph=True)
        state.tensors = {}
        _overwrite(changed, now)

    def _backward(self, stage: StageModule, part: MicroBatch) -> None:
        """Waits for gradients, runs backward, starts to send the gradients of what the stage received."""
        state = self._in_flight.pop((stage.index, part.index))
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for name, gradient in self._arrived_gradients(stage, part):
            root = state.returned[name]
            if gradient is not None and root.requires_grad:
                roots.append(root)
                gradients.append(gradient)
        state.returned = {}
        if roots:
            go_backward(roots, gradients)
        if state.deferred is not None:
            self._deferred[stage.index, part.index] = state.deferred
        for edge in stage.part.arriving:
            if edge.gradients:
                found = [state.gradients.get(name) for name in edge.gradients]
                self._mail.send(found, self._traffic.gradients(edge, part))
        for name, holder in self._job.split.input_gradients.items():
            if holder == stage.index:
                self.input_gradients[name, part.index] = state.gradients.get(name)

    def _weights(self, stage: StageModule, part: MicroBatch) -> None:
        """Computes the weight gradients that the backward has left."""
        stage.compute_weights(self._deferred.pop((stage.index, part.index)))

    def _run_stage(
        self, stage: StageModule, part: MicroBatch, state: _InFlight, keeps_graph: bool
    ) -> dict[str, Tensor]:
        stream = RandomStream(self._job.seed, self._job.step, part.index, self._device)
        if not self._job.needs_gradient:
            with torch.no_grad():
                return stage.run(state.tensors, part.size, stream)
        if keeps_graph and stage.index in self._job.splitting:
            state.deferred = Deferred()
        with torch.enable_grad(), nullcontext() if keeps_graph else forgetting():
            return stage.run(self._leaves(stage, state), part.size, stream, state.deferred)

    def _leaves(self, stage: StageModule, state: _InFlight) -> dict[str, Tensor]:
        """Turns what the stage received into leaves whose gradients are noted in `state`."""
        tensors = dict(state.tensors)
        for name in self._wanted[stage.index] & tensors.keys():
            tensors[name] = arrive(tensors[name], state.gradients, name)
        return tensors

    def _names_of_leaves(self, stage: int) -> frozenset[str]:
        """Returns what a stage receives whose gradient is wanted."""
        back = {name for edge in self._job.split.stages[stage].arriving for name in edge.gradients}
        return frozenset(back | {name for name, holder in self._job.split.input_gradients.items() if holder == stage})

    def _arrived(self, stage: StageModule, part: MicroBatch) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for edge in stage.part.arriving:
            self._put(tensors, edge.values, self._mail.take(self._traffic.activations(edge, part)))
        if self._traffic.needs_inputs(stage.index, part):
            names = self._traffic.travelling(stage.index)
            self._put(tensors, names, self._mail.take(self._traffic.inputs(stage.index, part)))
        for name in stage.part.inputs:
            if name not in tensors:
                tensors[name] = self._slice(name, part)
        return tensors

    def _put(self, tensors: dict[str, Tensor], names: Sequence[str], taken: Sequence[Tensor | None]) -> None:
        for name, tensor in zip(names, taken, strict=True):
            assert tensor is not None, f"{name} is always there; gradients alone may be missing"
            tensors[name] = tensor

    def _arrived_gradients(self, stage: StageModule, part: MicroBatch) -> Iterable[tuple[str, Tensor | None]]:
        """Yields the gradients of what a stage returns: of the model's outputs first, then of what it sent."""
        for place, name in stage.part.outputs:
            yield name, self.output_gradients(place, part)
        for edge in stage.part.leaving:
            if edge.gradients:
                yield from zip(edge.gradients, self._mail.take(self._traffic.gradients(edge, part)), strict=True)

    def _slice(self, name: str, part: MicroBatch) -> Tensor:
        """Returns a micro-batch's part of one of this rank's inputs."""
        tensor = self._inputs[name]
        return tensor.narrow(0, part.start, part.size).contiguous() if name in self._batch_inputs else tensor

    def _recomputes(self, stage: int) -> bool:
        return stage in self._job.recomputing


_METHODS: dict[Kind, Callable[[Executor, StageModule, MicroBatch], None]] = {
    Kind.FORWARD: Executor._forward,
    Kind.RECOMPUTE: Executor._recompute,
    Kind.BACKWARD: Executor._backward,
    Kind.WEIGHT: Executor._weights,
}


def _alone(output: Tensor) -> Tensor:
    """Returns an output without its graph, and without memory of more: torch leaves a mean in that of its terms."""
    output = output.detach()
    return output.clone() if output.untyped_storage().nbytes() > 2 * output.nbytes else output


def _no_gradient(place: int, part: MicroBatch) -> Tensor | None:
    return None


def _overwrite(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Puts values back into what forward changes; no backward reads that, so autograd need not know."""
    for name, value in values.items():
        with _unsafe_preserve_version_counter(state[name]):
            state[name].copy_(value)
