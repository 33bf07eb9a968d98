"""Executes a schedule on one rank: one short method an instruction, and a dict that joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks

from autovaruna.graph.origin import failed_at
from autovaruna.graph.random import RandomStream
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.events import Recorder
from autovaruna.runtime.mail import Kind as MailKind
from autovaruna.runtime.mail import Mail, Route
from autovaruna.runtime.world import World
from autovaruna.schedule.instruction import Instruction, Kind
from autovaruna.stage.module import StageModule
from autovaruna.stage.split import Edge, Split

_POST_AHEAD = 3
Place = tuple[int, int]
"""A stage and a micro-batch."""


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    tensors: dict[str, Tensor]
    returned: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One call of the model, as every rank sees it.

    Attributes:
        split: the stages of the call's graph.
        plan: where each runs.
        batch: its micro-batches.
        needs_gradient: whether backwards follow.
        seed, step: what random nodes depend on.
        graph_key: digest of the graph.
        is_sum: whether losses are added rather than averaged.
        recomputing: stages that run forward again before backward.
    """

    split: Split
    plan: Plan
    batch: GlobalBatch
    needs_gradient: bool
    seed: int
    step: int
    graph_key: str
    is_sum: bool
    recomputing: frozenset[int]

    def rank_weight(self, rank: int) -> float:
        """Returns the weight of a rank's own loss in that of the global batch: its share of samples, or one."""
        if self.is_sum:
            return 1.0
        return sum(part.size for part in self.batch.owned_by(rank)) / self.batch.num_samples

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Returns the rank that runs a micro-batch at a stage."""
        return self.plan.rank_of(stage, micro_batch)


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

    `output_gradients` gives the gradient of output `place` for a micro-batch; a loss has its share. `origin`
    names the outputs that have one, if calls differ in that: gradients are there or not by what backward starts from.
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
        self._inputs = inputs
        self._device = device
        self._recorder = recorder
        self._in_flight: dict[Place, _InFlight] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.input_gradients: dict[tuple[str, int], Tensor | None] = {}
        self.output_gradients: Callable[[int, MicroBatch], Tensor | None] = lambda place, part: None
        self.origin = ""
        self._instruction: Instruction | None = None
        self._batch_inputs = job.split.traced.batch_inputs
        self._methods: dict[Kind, Callable[[StageModule, MicroBatch], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
        }

    def send_inputs(self) -> None:
        """Starts to send this rank's samples to the stages that use them."""
        for part in self._job.batch.owned_by(self._world.rank):
            for stage in self._job.split.stages if part.origin == self._world.rank else ():
                destination = self._job.rank_of(stage.index, part.index)
                names = self._travelling(stage.inputs)
                if names and not self._job.batch.has(destination, part):
                    self._mail.send([self._slice(name, part) for name in names], self._inputs_kind(stage.index, part))

    def run(self, program: Sequence[Instruction]) -> None:
        """Executes instructions in order."""
        posted = 0
        for position, instruction in enumerate(program):
            while posted < min(position + 1 + _POST_AHEAD, len(program)):
                self._post(program[posted])
                posted += 1
            part = self._job.batch.micro_batches[instruction.micro_batch]
            self._instruction = instruction
            begin = perf_counter()
            self._methods[instruction.kind](self._stages[instruction.stage], part)
            if self._recorder is not None:
                self._recorder.note(instruction, begin, perf_counter())
            self._world.progress()

    def where(self, error: BaseException) -> str:
        """Returns rank, stage and micro-batch, and the line of the user's model if an operation raised `error`."""
        if self._instruction is None:
            return f"rank {self._world.rank}, before the first instruction"
        part = self._job.batch.micro_batches[self._instruction.micro_batch]
        owner = "" if len(self._job.batch.groups) == 1 else f" of rank {part.origin}"
        samples = f"samples {part.start} to {part.start + part.size - 1}{owner}"
        place = f"rank {self._world.rank}, stage {self._instruction.stage}, micro-batch {part.index} ({samples})"
        return place + failed_at(error, self._job.split.traced.nodes)

    def _post(self, instruction: Instruction) -> None:
        """Posts the receives that an instruction will wait for."""
        part = self._job.batch.micro_batches[instruction.micro_batch]
        stage = self._job.split.stages[instruction.stage]
        if instruction.kind is Kind.FORWARD:
            kinds = [self._edge_kind(edge, part, is_back=False) for edge in stage.arriving]
            if self._needs_mail(stage.inputs, part):
                kinds.append(self._inputs_kind(stage.index, part))
        elif instruction.kind is Kind.BACKWARD:
            kinds = [self._edge_kind(edge, part, is_back=True) for edge in stage.leaving if edge.gradients]
        else:
            kinds = []
        for kind in kinds:
            self._mail.expect(kind)

    def _forward(self, stage: StageModule, part: MicroBatch) -> None:
        """Waits for inputs and activations, runs the stage, starts to send what it returns."""
        state = _InFlight(self._arrived(stage, part))
        keeps_graph = self._job.needs_gradient and not self._recomputes(stage.index)
        if self._job.needs_gradient and not keeps_graph:
            changed = stage.changed_buffers(self._job.split.traced.changed_buffers)
            state.buffers = {name: buffer.clone() for name, buffer in changed.items()}
        returned = self._run_stage(stage, part, state, keeps_graph)
        for edge in stage.part.leaving:
            self._mail.send(
                [returned[name].detach() for name in edge.values], self._edge_kind(edge, part, is_back=False)
            )
        for place, name in stage.part.outputs:
            self.outputs[place, part.index] = returned[name].detach()
        if keeps_graph:
            state.returned, state.tensors = returned, {}
        if self._job.needs_gradient:
            self._in_flight[stage.index, part.index] = state

    def _recompute(self, stage: StageModule, part: MicroBatch) -> None:
        """Runs the forward of a micro-batch again, from the same buffers and with the same random numbers."""
        state = self._in_flight[stage.index, part.index]
        buffers = stage.changed_buffers(self._job.split.traced.changed_buffers)
        now = {name: buffer.clone() for name, buffer in buffers.items()}
        _overwrite(buffers, state.buffers)
        state.returned = self._run_stage(stage, part, state, keeps_graph=True)
        _overwrite(buffers, now)

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
            torch.autograd.backward(roots, gradients)
        for edge in stage.part.arriving:
            if edge.gradients:
                found = [state.gradients.get(name) for name in edge.gradients]
                self._mail.send(found, self._edge_kind(edge, part, is_back=True))
        for name, holder in self._job.split.input_gradients.items():
            if holder == stage.index:
                self.input_gradients[name, part.index] = state.gradients.get(name)

    def _run_stage(
        self, stage: StageModule, part: MicroBatch, state: _InFlight, keeps_graph: bool
    ) -> dict[str, Tensor]:
        stream = RandomStream(self._job.seed, self._job.step, part.index, self._device)
        if not self._job.needs_gradient:
            with torch.no_grad():
                return stage.run(state.tensors, part.size, stream)
        with torch.enable_grad(), nullcontext() if keeps_graph else _forgetting():
            return stage.run(self._leaves(stage, state), part.size, stream)

    def _leaves(self, stage: StageModule, state: _InFlight) -> dict[str, Tensor]:
        """Turns what the stage received into leaves whose gradients are noted in `state`."""
        wanted = {name for edge in stage.part.arriving for name in edge.gradients}
        wanted |= {name for name, holder in self._job.split.input_gradients.items() if holder == stage.index}
        tensors = dict(state.tensors)
        for name in wanted & tensors.keys():
            leaf = tensors[name].detach().requires_grad_()
            leaf.register_hook(partial(_note, state.gradients, name))  # type: ignore[no-untyped-call]
            tensors[name] = leaf
        return tensors

    def _arrived(self, stage: StageModule, part: MicroBatch) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for edge in stage.part.arriving:
            for name, tensor in zip(
                edge.values, self._mail.take(self._edge_kind(edge, part, is_back=False)), strict=True
            ):
                assert tensor is not None
                tensors[name] = tensor
        travelling = self._travelling(stage.part.inputs)
        if self._needs_mail(stage.part.inputs, part):
            for name, tensor in zip(travelling, self._mail.take(self._inputs_kind(stage.index, part)), strict=True):
                assert tensor is not None
                tensors[name] = tensor
        for name in stage.part.inputs:
            if name not in tensors:
                tensors[name] = self._slice(name, part)
        return tensors

    def _arrived_gradients(self, stage: StageModule, part: MicroBatch) -> Iterable[tuple[str, Tensor | None]]:
        """Yields the gradients of what a stage returns: of the model's outputs first, then of what it sent."""
        for place, name in stage.part.outputs:
            yield name, self.output_gradients(place, part)
        for edge in stage.part.leaving:
            if edge.gradients:
                yield from zip(edge.gradients, self._mail.take(self._edge_kind(edge, part, is_back=True)), strict=True)

    def _slice(self, name: str, part: MicroBatch) -> Tensor:
        """Returns a micro-batch's part of one of this rank's inputs."""
        tensor = self._inputs[name].detach()
        return tensor.narrow(0, part.start, part.size).contiguous() if name in self._batch_inputs else tensor

    def _travelling(self, names: Sequence[str]) -> list[str]:
        """Returns the inputs that go from rank to rank; tensors that are no batch are the same on all of them."""
        return [name for name in names if name in self._batch_inputs]

    def _needs_mail(self, names: Sequence[str], part: MicroBatch) -> bool:
        return not self._job.batch.has(self._world.rank, part) and bool(self._travelling(names))

    def _recomputes(self, stage: int) -> bool:
        return stage in self._job.recomputing

    def _edge_kind(self, edge: Edge, part: MicroBatch, *, is_back: bool) -> MailKind:
        source = self._job.rank_of(edge.source, part.index)
        destination = self._job.rank_of(edge.destination, part.index)
        route = (
            Route(destination, source, 4 * edge.index + 1) if is_back else Route(source, destination, 4 * edge.index)
        )
        return MailKind(self._job.graph_key + (self.origin if is_back else ""), route, part.size)

    def _inputs_kind(self, stage: int, part: MicroBatch) -> MailKind:
        route = Route(part.origin, self._job.rank_of(stage, part.index), 4 * stage + 2)
        return MailKind(self._job.graph_key, route, part.size)


def _forgetting() -> saved_tensors_hooks:
    """Keeps nothing for a backward; under no_grad, lstm and others choose another kernel, with other last bits."""
    return saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


def _note(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    gradients[name] = gradient


def _overwrite(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Puts values back into buffers; no backward reads them, so autograd need not know."""
    for name, value in values.items():
        with _unsafe_preserve_version_counter(buffers[name]):
            buffers[name].copy_(value)
