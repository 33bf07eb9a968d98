"""Splits graphs as the plan says and binds their stages to this rank's parameters, each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from autovaruna.errors import PlanError
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.predicting.orders import Orders
from autovaruna.planner.problem import SPLIT_REFUSAL
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.runtime.gradient_sums.gradient_book import GradientBook
from autovaruna.runtime.gradient_sums.gradients import GradientSum
from autovaruna.runtime.traffic import Traffic
from autovaruna.runtime.weights.placement import OwnedState, Placement, placement_of
from autovaruna.runtime.worlds.world import World
from autovaruna.schedule.instruction import Kind, Schedule
from autovaruna.settings import Settings
from autovaruna.stage.assignment import Assignment, carry_over
from autovaruna.stage.compiled import CompiledPiece
from autovaruna.stage.module import StageModule
from autovaruna.stage.split import Split, StagePart, split

_KNOWN_BATCHES = 8
"""Batches of other sizes whose messages are kept: the last one of an epoch, for example."""


@dataclass(frozen=True)
class Prepared:
    """A graph, split and bound to this rank's parameters.

    Attributes:
        split: its stages.
        stages: those of this rank.
        gradients: sums what they collect.
        traffic: the messages of this rank, for the micro-batches of a call.
        recomputing, splitting: the stages that run forward again, and those that compute weight gradients apart.
        is_half: whether some of its gradients are float16.
    """

    split: Split
    stages: dict[int, StageModule]
    gradients: GradientBook
    traffic: Callable[[GlobalBatch], Traffic]
    recomputing: frozenset[int]
    splitting: frozenset[int]
    is_half: bool


class PreparedGraphs:
    """The graphs of a planned model, as this rank runs them.

    Args:
        state: The model's parameters and buffers, of which this rank holds its part.
        plan: The plan.
        assignment: The stages of the graph that was planned.
        placement: Who holds which parameter; it grows with graphs that change further buffers.
        orders: The instructions of every rank, for each graph.
        settings: The settings.
        world: The ranks.
        device: Where this rank computes.

    Attributes:
        books: those that sum the gradients of the graphs that have run.

    Raises:
        PlanError: stages are to be compiled, and the plan splits their backward.
    """

    def __init__(
        self,
        state: OwnedState,
        plan: Plan,
        assignment: Assignment,
        placement: Placement,
        orders: Orders,
        settings: Settings,
        world: World,
        device: torch.device,
    ) -> None:
        self.placement = placement
        self._state = state
        self._plan = plan
        self._assignment = assignment
        self._orders = orders
        self._backend = settings.compile_stages
        self._world = world
        self._device = device
        self._known: dict[str, Prepared] = {}
        self.books: list[GradientBook] = []
        if _stages_with(Kind.WEIGHT, orders.planned) and self._backend is not False:
            raise PlanError(SPLIT_REFUSAL)

    def of(self, traced: TracedModel) -> Prepared:
        """Returns a graph's stages, bound to the parameters as they are now."""
        if traced.key not in self._known:
            self._known[traced.key] = self._prepare(traced)
        prepared = self._known[traced.key]
        for stage in prepared.stages.values():
            if not stage.is_bound():
                stage.bind()
        return prepared

    def _prepare(self, traced: TracedModel) -> Prepared:
        assignment = carry_over(self._assignment, traced)
        self._learn_holders(traced, assignment)
        parts = split(traced, assignment)
        stages = self._stages(parts, traced)
        total = GradientSum(parts, self._plan, self._world, self._state.parameters(), self.placement)
        schedule = self._orders.along((edge.source, edge.destination, bool(edge.gradients)) for edge in parts.edges)
        book = GradientBook(total, list(stages.values()), self._world)
        self.books.append(book)
        return Prepared(
            parts,
            stages,
            book,
            lru_cache(_KNOWN_BATCHES)(
                partial(Traffic, parts, self._plan, self._world.rank, schedule[self._world.rank])
            ),
            _stages_with(Kind.RECOMPUTE, schedule),
            _stages_with(Kind.WEIGHT, schedule),
            _is_half(traced),
        )

    def _stages(self, parts: Split, traced: TracedModel) -> dict[int, StageModule]:
        """Returns the stages of this rank."""
        parameters, buffers = self._state.parameters(), self._state.buffers()
        constants = {name: tensor.to(self._device) for name, tensor in traced.constants.items()}
        numbers: dict[tuple[str, int], Any] = {}

        def size_of(name: str, batch_size: int) -> Any:
            if (name, batch_size) not in numbers:
                numbers[name, batch_size] = traced.sizes.number(traced.nodes[name].meta["val"], batch_size)
            return numbers[name, batch_size]

        return {
            part.index: StageModule(part, parameters, buffers, constants, size_of, self._compiled(part, traced))
            for part in parts.stages
            if self._world.rank in self._plan.stages[part.index].ranks
        }

    def _compiled(self, part: StagePart, traced: TracedModel) -> CompiledPiece | None:
        """Returns what runs a stage if stages are compiled."""
        if self._backend is False:
            return None
        return CompiledPiece(part.piece, traced, "inductor" if self._backend is True else self._backend)

    def _learn_holders(self, traced: TracedModel, assignment: Assignment) -> None:
        """Notes who holds the buffers that this graph changes and earlier ones (of eval mode, say) did not."""
        stages = {name: assignment.holders[name] for name in traced.changed_state - self.placement.holders.keys()}
        every = placement_of(assignment, self._plan).holders
        ranks = {name: every[name] for name in stages}
        self._assignment = replace(self._assignment, holders=self._assignment.holders | stages)
        self.placement = replace(self.placement, holders=self.placement.holders | ranks)


def _stages_with(kind: Kind, schedule: Schedule) -> frozenset[int]:
    return frozenset(instruction.stage for rank in schedule for instruction in rank if instruction.kind is kind)


def _is_half(traced: TracedModel) -> bool:
    return any(
        fact.needs_gradient and isinstance(fact.value, Tensor) and fact.value.dtype is torch.float16
        for fact in traced.facts.values()
    )
