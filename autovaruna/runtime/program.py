"""Defines `Program`: what this rank does in a call, made once from plan and schedule and kept for calls of its size.

plan, schedule ──> BoundGraph ── size of the batch ──> Program ── kinds of work ──> [Task, Task, ...]

Task: an instruction of the schedule (2F0: stage 2, forward, micro-batch 0), what it receives and what it sends
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autovaruna.graph.traced import OutputKind
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.gradients import GradientBook
from autovaruna.runtime.mail import Messages, Parcel
from autovaruna.schedule.pipeline import Instruction, Kind
from autovaruna.stage.module import StageModule
from autovaruna.stage.split import Split, StagePart


@dataclass(frozen=True, eq=False)
class BoundGraph:
    """A graph, split, with the stages of this rank bound to its parameters.

    Attributes:
        book: sums the gradients of the stages.
        instructions: this rank's, in the order of its schedule.
        recomputing: the stages that run forward again.
        is_sum: whether the losses of micro-batches are added.
        is_half: whether some gradients are float16.
    """

    split: Split
    plan: Plan
    rank: int
    stages: Mapping[int, StageModule]
    book: GradientBook
    instructions: Sequence[Instruction]
    recomputing: frozenset[int]
    is_sum: bool
    is_half: bool


@dataclass(frozen=True, slots=True)
class Task:
    """An instruction with its micro-batch and its messages.

    `own` are inputs of a forward that are this rank's own; `ends_stage`: the stage has its last gradients here then.
    """

    instruction: Instruction
    part: MicroBatch
    receives: tuple[Parcel, ...]
    sends: tuple[Parcel, ...]
    own: tuple[str, ...]
    ends_stage: bool


class Program:
    """What this rank does in calls of one graph whose batch has one size.

    Attributes:
        lengths: those that vary in the graph.
        outputs: the model's, by place; `loss_place`: that of the loss; -1: the caller makes it.
        kept_inputs: those whose numbers stages have already.
        is_parted: whether there are several micro-batches that a look at the step may run in parts.
        kinds: what is to be looked at once at least: the graph, and that in micro-batches.
        wanted: what each stage receives whose gradient is wanted.
        handed_out: this rank's own samples that other ranks compute with: whose, and the message.
    """

    def __init__(self, graph: BoundGraph, batch: GlobalBatch, key: str, lengths: tuple[int, ...]) -> None:
        self.graph, self.batch, self.lengths = graph, batch, lengths
        self.split, self.traced, self.rank = graph.split, graph.split.traced, graph.rank
        self.messages = Messages(graph.split, graph.plan, key)
        self.outputs = dict(enumerate(self.traced.outputs))
        self.loss_place = next((place for place, each in self.outputs.items() if each.kind is OutputKind.LOSS), -1)
        self.kept_inputs = tuple(name for name, each in self.traced.inputs.items() if each.is_kept)
        has_parts = self.traced.sizes.symbol is not None and len(batch.micro_batches) > 1
        self.is_parted = has_parts and not self.kept_inputs
        self.kinds = (self.traced.key, f"{self.traced.key} in parts") if self.is_parted else (self.traced.key,)
        self._factor: float | None = None
        self._seeds: dict[float, Tensor] = {}
        self._tasks: dict[tuple[tuple[Kind, ...], str], list[Task]] = {}
        handed = self.traced.batch_inputs.difference(self.kept_inputs)
        self._batches = [tuple(name for name in stage.inputs if name in handed) for stage in self.split.stages]
        self.wanted = [{name for edge in stage.arriving for name in edge.gradients} for stage in self.split.stages]
        for name, holder in self.split.input_gradients.items():
            self.wanted[holder].add(name)
        self.handed_out = [
            (part, self._inputs(stage, part))
            for part in batch.owned_by(self.rank)
            for stage in (self.split.stages if part.origin == self.rank else ())
            if self._batches[stage.index] and not batch.has(graph.plan.rank_of(stage.index, part.index), part)
        ]

    def seeds(self, factor: float) -> dict[float, Tensor]:
        """Returns the gradient of each micro-batch's loss, by its weight, for a backward from `factor`."""
        if self._factor != factor:
            self._factor, loss = factor, self.outputs[self.loss_place]
            value: Tensor = self.traced.nodes[loss.node].meta["val"]
            weights = {part.weight for part in self.batch.micro_batches.values()}
            self._seeds = {
                weight: torch.full((), weight * factor, dtype=value.dtype, device=value.device) for weight in weights
            }
        return self._seeds

    def tasks(self, kinds: tuple[Kind, ...], root_names: str = "") -> list[Task]:
        """Returns this rank's tasks of some kinds, in order, without those of empty micro-batches.

        `root_names` names the outputs that a backward starts from, where calls differ in that.
        """
        known = self._tasks.get((kinds, root_names))
        if known is None:
            full = self.batch.micro_batches
            chosen = [each for each in self.graph.instructions if each.kind in kinds and each.micro_batch in full]
            last = {each.stage: each for each in chosen if each.kind is Kind.BACKWARD}
            known = [self._task(each, root_names, last.get(each.stage) is each) for each in chosen]
            self._tasks[kinds, root_names] = known
        return known

    def weight_of(self, rank: int) -> float:
        """Returns the weight of a rank's own loss in that of the global batch: its share of samples, or one."""
        return 1.0 if self.graph.is_sum else self.batch.num_samples_of(rank) / self.batch.num_samples

    def weight_of_origin(self, rank: int) -> float:
        """Returns `weight_of`, shared out over the ranks that pass the same mini-batch."""
        own = sum(part.size for part in self.batch.micro_batches.values() if part.origin == rank)
        return self.weight_of(rank) * own / max(self.batch.num_samples_of(rank), 1)

    def _task(self, step: Instruction, root_names: str, ends_stage: bool) -> Task:
        part, stage, messages = self.batch.micro_batches[step.micro_batch], self.split.stages[step.stage], self.messages
        receives: list[Parcel] = []
        sends: list[Parcel] = []
        own: tuple[str, ...] = ()
        if step.kind is Kind.FORWARD:
            receives, own = self._received(stage, part)
            sends = [messages.activations(edge, part) for edge in stage.leaving]
        elif step.kind is Kind.BACKWARD:
            receives = [messages.gradients(edge, part, root_names) for edge in stage.leaving if edge.gradients]
            sends = [messages.gradients(edge, part, root_names) for edge in stage.arriving if edge.gradients]
        return Task(step, part, tuple(receives), tuple(sends), own, ends_stage)

    def _received(self, stage: StagePart, part: MicroBatch) -> tuple[list[Parcel], tuple[str, ...]]:
        """Returns the messages that a forward waits for, and the inputs that are this rank's own."""
        parcels = [self.messages.activations(edge, part) for edge in stage.arriving]
        if self._batches[stage.index] and not self.batch.has(self.rank, part):
            parcels.append(self._inputs(stage, part))
        arriving = {name for parcel in parcels for name in parcel.names}
        return parcels, tuple(name for name in stage.inputs if name not in arriving)

    def _inputs(self, stage: StagePart, part: MicroBatch) -> Parcel:
        return self.messages.inputs(stage.index, part, self._batches[stage.index])


@dataclass(frozen=True, eq=False)
class ModelCall:
    """One call of the model.

    Attributes:
        number: how many came before.
        seed: with number and micro-batch, what random operations draw from.
        inputs: this rank's mini-batch, by name.
        of_batch: what micro-batches are given of the whole batch, by the weight of their loss and the name of the node.
        name: what to call it in errors.
    """

    program: Program
    number: int
    seed: int
    needs_gradient: bool
    inputs: Mapping[str, Tensor]
    of_batch: Mapping[float, Mapping[str, Tensor]]
    name: str
