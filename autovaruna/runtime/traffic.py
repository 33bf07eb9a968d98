"""Knows what each instruction of a rank receives and sends; worked out once, for all steps of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.mail import Kind, Parcel, Route
from autovaruna.schedule.instruction import Instruction
from autovaruna.schedule.instruction import Kind as Work
from autovaruna.stage.split import Edge, Split, StagePart


@dataclass(frozen=True, slots=True)
class Act:
    """An instruction with what it needs to know of its micro-batch.

    Attributes:
        instruction: what is done.
        part: the micro-batch.
        receives: what it waits for.
        sends: what it makes for others.
        own: inputs of a forward that are this rank's own.
        ends_stage: whether the stage has its last gradients on this rank afterwards.
    """

    instruction: Instruction
    part: MicroBatch
    receives: tuple[Parcel, ...]
    sends: tuple[Parcel, ...]
    own: tuple[str, ...]
    ends_stage: bool


class Traffic:
    """The messages of one kind of call, as one rank sees them.

    Args:
        split: The stages of the call's graph.
        plan: Where each runs.
        rank: This rank.
        instructions: All that this rank may do, in order.
        batch: The micro-batches.
        graph_key: Digest of the graph, and of its lengths in the call.

    Attributes:
        wanted: what each stage receives whose gradient is wanted.
        handed_out: this rank's own samples that other ranks compute with, and whose samples they are.
    """

    def __init__(
        self,
        split: Split,
        plan: Plan,
        rank: int,
        instructions: Sequence[Instruction],
        batch: GlobalBatch,
        graph_key: str,
    ) -> None:
        self._split = split
        self._plan = plan
        self._rank = rank
        self._instructions = instructions
        self._batch = batch
        self._graph_key = graph_key
        self._factor: float | None = None
        self._seeds: dict[float, Tensor] = {}
        self._programs: dict[tuple[tuple[Work, ...], str], list[Act]] = {}
        self._travelling = [
            tuple(name for name in stage.inputs if name in split.traced.batch_inputs) for stage in split.stages
        ]
        self.wanted = [self._wanted_by(stage) for stage in split.stages]
        self.handed_out = [
            (part, self._inputs(stage, part))
            for part in batch.owned_by(rank)
            for stage in (split.stages if part.origin == rank else ())
            if self._travelling[stage.index] and not batch.has(plan.rank_of(stage.index, part.index), part)
        ]

    def seeds(self, factor: float) -> dict[float, Tensor]:
        """Returns the gradient of each micro-batch's loss, by its share, for a backward from `factor`."""
        if self._factor != factor:
            self._factor, value = factor, self._traced_loss
            shares = {part.share for part in self._batch.micro_batches.values()}
            self._seeds = {
                share: torch.full((), share * factor, dtype=value.dtype, device=value.device) for share in shares
            }
        return self._seeds

    @property
    def _traced_loss(self) -> Tensor:
        loss = self._split.traced.loss
        assert loss is not None, "a step goes backward from a loss"
        value: Tensor = self._split.traced.nodes[loss.node].meta["val"]
        return value

    def program(self, kinds: tuple[Work, ...], origin: str = "") -> list[Act]:
        """Returns this rank's instructions of some kinds, without those of empty micro-batches.

        Args:
            kinds: The kinds.
            origin: Names the outputs that have a gradient, where calls differ in that: then messages back differ, too.
        """
        known = self._programs.get((kinds, origin))
        if known is None:
            known = self._programs[kinds, origin] = self._made(kinds, origin)
        return known

    def _made(self, kinds: tuple[Work, ...], origin: str) -> list[Act]:
        chosen = [step for step in self._instructions if step.kind in kinds and self._is_full(step)]
        last = {step.stage: step for step in chosen if step.kind in (Work.BACKWARD, Work.WEIGHT)}
        return [self._act(step, origin, last.get(step.stage) is step) for step in chosen]

    def _is_full(self, step: Instruction) -> bool:
        return step.micro_batch in self._batch.micro_batches

    def _act(self, step: Instruction, origin: str, ends_stage: bool) -> Act:
        part, stage = self._batch.micro_batches[step.micro_batch], self._split.stages[step.stage]
        receives: list[Parcel] = []
        sends: list[Parcel] = []
        own: tuple[str, ...] = ()
        if step.kind is Work.FORWARD:
            receives, own = self._received(stage, part)
            sends = [self._activations(edge, part) for edge in stage.leaving]
        elif step.kind is Work.BACKWARD:
            receives = [self._gradients(edge, part, origin) for edge in stage.leaving if edge.gradients]
            sends = [self._gradients(edge, part, origin) for edge in stage.arriving if edge.gradients]
        return Act(step, part, tuple(receives), tuple(sends), own, ends_stage)

    def _received(self, stage: StagePart, part: MicroBatch) -> tuple[list[Parcel], tuple[str, ...]]:
        """Returns the messages that a forward waits for, and the inputs that it takes from this rank's own."""
        parcels = [self._activations(edge, part) for edge in stage.arriving]
        if self._travelling[stage.index] and not self._batch.has(self._rank, part):
            parcels.append(self._inputs(stage, part))
        come = {name for parcel in parcels for name in parcel.names}
        return parcels, tuple(name for name in stage.inputs if name not in come)

    def _inputs(self, stage: StagePart, part: MicroBatch) -> Parcel:
        """Returns the parcel that takes inputs to a stage; those that are no batches are the same on all ranks."""
        route = Route(part.origin, self._plan.rank_of(stage.index, part.index), 4 * stage.index + 2)
        return Parcel(Kind(self._graph_key, route, part.size), self._travelling[stage.index])

    def _activations(self, edge: Edge, part: MicroBatch) -> Parcel:
        """Returns the parcel that takes a cut's values on."""
        route = Route(*self._ends(edge, part), 4 * edge.index)
        return Parcel(Kind(self._graph_key, route, part.size), edge.values)

    def _gradients(self, edge: Edge, part: MicroBatch, origin: str) -> Parcel:
        """Returns the parcel that takes the gradients of a cut's values back."""
        source, destination = self._ends(edge, part)
        route = Route(destination, source, 4 * edge.index + 1)
        return Parcel(Kind(self._graph_key + origin, route, part.size), edge.gradients)

    def _ends(self, edge: Edge, part: MicroBatch) -> tuple[int, int]:
        return self._plan.rank_of(edge.source, part.index), self._plan.rank_of(edge.destination, part.index)

    def _wanted_by(self, stage: StagePart) -> frozenset[str]:
        back = {name for edge in stage.arriving for name in edge.gradients}
        held = self._split.input_gradients.items()
        return frozenset(back | {name for name, holder in held if holder == stage.index})
