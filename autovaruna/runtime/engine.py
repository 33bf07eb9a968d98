"""Runs calls of a planned model: splits each graph as the plan says, binds its stages to this rank, and runs steps."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autovaruna.errors import InputError
from autovaruna.graph.key_values import KeptTensor
from autovaruna.graph.lengths import free_value
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.tree import Constant, HidingLeaf, Undelivered
from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.runtime.executor import RankContext
from autovaruna.runtime.gradients import GradientBook
from autovaruna.runtime.program import BoundGraph, ModelCall, Program
from autovaruna.runtime.step import SplitStep, WholeStep
from autovaruna.runtime.weights import Placement, placement_of
from autovaruna.schedule.pipeline import Kind, Schedule
from autovaruna.stage.module import CompiledPiece, StageModule
from autovaruna.stage.split import Assignment, Split, carry_over, split

logger = logging.getLogger(__name__)
_KNOWN_SIZES = 1024
_KNOWN_BATCHES = 8
"""Batches of other sizes whose messages are kept: the last one of an epoch, for example."""


class _KnownGraph(NamedTuple):
    """A graph that is split and bound, and what makes its program for a batch, the key of its messages, and lengths."""

    graph: BoundGraph
    program_of: Callable[[GlobalBatch, str, tuple[int, ...]], Program]


def _stages_with(kind: Kind, schedule: Schedule) -> frozenset[int]:
    return frozenset(instruction.stage for rank in schedule for instruction in rank if instruction.kind is kind)


@dataclass(eq=False, repr=False)
class Engine:
    """Runs a planned model on this rank.

    Attributes:
        placement: who holds which parameter, and which buffer that calls have changed.
        orders: the instructions of every rank, for each graph.
        of_model: says in errors which model this is, behind other words.
    """

    rank: RankContext
    plan: Plan
    assignment: Assignment
    placement: Placement
    orders: RankOrders
    seed: int
    of_model: str

    def __post_init__(self) -> None:
        rank = self.rank
        if rank.settings.offload and rank.device.type != "cuda" and rank.world.rank == 0:
            logger.info("offload=True changes nothing on %s, whose memory is the host's", rank.device.type)
        self._known: dict[str, _KnownGraph] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()

    def run(
        self,
        traced: TracedModel,
        tensors: Sequence[Tensor],
        number: int,
        batch: GlobalBatch,
        of_batch: Mapping[float, dict[str, Tensor]],
        lengths: tuple[int, ...] = (),
    ) -> Any:
        """Runs one call and returns what the model returns. Collective.

        Args:
            tensors: This rank's mini-batch, in the order of the graph's inputs.
            of_batch: What micro-batches are given of the whole batch, by the weight of their loss and the name of the
                node.
            lengths: Those that vary in the graph, in this call.
        """
        graph, program_of = self._known_graph(traced)
        needs_gradient = torch.is_grad_enabled() and traced.needs_gradient
        if needs_gradient and not self.plan.needs_gradient:
            raise InputError(
                "The model was planned for evaluation, in a first call without gradients and without an optimizer: got "
                "a call with gradients. Pass the optimizer to AutoVaruna, or make the first call one with gradients."
            )
        self._refuse_other_caches(tensors, batch)
        call = ModelCall(
            program=program_of(batch, self._key(traced, lengths), lengths),
            number=number,
            seed=self.seed,
            needs_gradient=needs_gradient,
            inputs=dict(zip(traced.inputs, tensors, strict=True)),
            of_batch=of_batch,
            name=f"call {number + 1}{self.of_model}",
        )
        is_whole = needs_gradient and traced.loss is not None
        factor = self.rank.loss_scale.expected_factor(graph.is_half) if is_whole else 1.0
        step = WholeStep(call, self.rank, factor) if is_whole else SplitStep(call, self.rank)
        outputs = step.run(self.placement)
        delivered: list[Any] = [
            Undelivered(HidingLeaf(spec.path, "tensor")) if output is None else output
            for output, spec in zip(outputs, traced.outputs, strict=True)
        ]
        own = batch.num_samples_of(self.rank.world.rank)

        def other(leaf: HidingLeaf | Constant) -> Any:
            if isinstance(leaf, HidingLeaf):
                return Undelivered(leaf)
            try:
                return traced.sizes.in_call(leaf.value, own, lengths)
            except TypeError:  # numbers in tensors say what it is
                return Undelivered(HidingLeaf("that is counted in a tensor", "number"))

        return traced.output_tree.unflatten(delivered, other)

    def _refuse_other_caches(self, tensors: Sequence[Tensor], batch: GlobalBatch) -> None:
        """Refuses keys and values that stages have of other samples than those of the call, or of another model."""
        for each in tensors:
            if isinstance(each, KeptTensor) and not each.kept.is_of(self.rank.state, batch.micro_batches):
                raise InputError(
                    "The key-value cache is of another call: got a cache of another model, or of batches that ranks "
                    "cut in another way. Expected one that this model returned for batches of the sizes of this call."
                )

    def _known_graph(self, traced: TracedModel) -> _KnownGraph:
        """Returns a graph whose stages are bound to the parameters as they are now."""
        if traced.key not in self._known:
            graph = self._bind(traced)
            self._known[traced.key] = _KnownGraph(graph, lru_cache(_KNOWN_BATCHES)(partial(Program, graph)))
        known = self._known[traced.key]
        for stage in known.graph.stages.values():
            if not stage.is_bound():
                stage.bind()
        return known

    def _bind(self, traced: TracedModel) -> BoundGraph:
        assignment = carry_over(self.assignment, traced)
        self._record_holders(traced, assignment)
        parts = split(traced, assignment)
        stages = self._stages(parts, traced)
        schedule = self.orders.along((edge.source, edge.destination, bool(edge.gradients)) for edge in parts.edges)
        parameters, rank = self.rank.state.parameters(), self.rank.world.rank
        book = GradientBook(parts, self.plan, self.rank.world, parameters, self.placement, list(stages.values()))
        self.rank.books.append(book)
        values = [fact.value for fact in traced.facts.values() if fact.needs_gradient]
        return BoundGraph(
            split=parts,
            plan=self.plan,
            rank=rank,
            stages=stages,
            book=book,
            instructions=schedule[rank],
            recomputing=_stages_with(Kind.RECOMPUTE, schedule),
            is_sum=self.rank.settings.reduction == "sum",
            is_half=any(isinstance(each, Tensor) and each.dtype is torch.float16 for each in values),
        )

    def _stages(self, parts: Split, traced: TracedModel) -> dict[int, StageModule]:
        """Returns the stages of this rank, compiled if they are to be."""
        parameters, buffer = self.rank.state.parameters(), self.rank.state.tensor
        constants = {name: tensor.to(self.rank.device) for name, tensor in traced.constants.items()}
        backend = self.rank.settings.compile_stages
        backend = "inductor" if backend is True else backend

        @lru_cache(_KNOWN_SIZES)
        def size_of(name: str, batch_size: int, lengths: tuple[int, ...]) -> Any:
            return traced.sizes.in_call(free_value(traced.nodes[name]), batch_size, lengths)

        own = [part for part in parts.stages if self.rank.world.rank in self.plan.stages[part.index].ranks]
        runs = [CompiledPiece(part.piece, traced, backend) if backend else None for part in own]
        return {
            part.index: StageModule(part, parameters, buffer, constants, size_of, run)
            for part, run in zip(own, runs, strict=True)
        }

    def _record_holders(self, traced: TracedModel, assignment: Assignment) -> None:
        """Records who holds the buffers that this graph changes and earlier ones (of eval mode, say) did not."""
        stages = {name: assignment.holders[name] for name in traced.changed_state - self.placement.holders.keys()}
        every = placement_of(assignment, self.plan).holders
        ranks = {name: every[name] for name in stages}
        self.assignment = replace(self.assignment, holders=self.assignment.holders | stages)
        self.placement = replace(self.placement, holders=self.placement.holders | ranks)

    def _key(self, traced: TracedModel, lengths: tuple[int, ...]) -> str:
        """Returns the key of messages for such lengths; of those that were met longest ago, messages are forgotten."""
        if not lengths:
            return traced.key
        key = f"{traced.key}{lengths}"
        self._recent[key] = None
        self._recent.move_to_end(key)
        if len(self._recent) > _KNOWN_BATCHES:
            self.rank.mail.forget(self._recent.popitem(last=False)[0])
        return key

    def forget(self, key: str) -> None:
        """Forgets a graph, unless it has kept gradients back. All ranks do at the same call."""
        known = self._known.get(key)
        if known is not None and not known.graph.book.may_have_kept:
            del self._known[key]
            self.rank.books.remove(known.graph.book)
        self.rank.mail.forget(key)
        if self.rank.witness is not None:
            self.rank.witness.forget(key)

    @property
    def script_actions(self) -> dict[str, str]:
        """What the script has done between calls, in words: the same on every rank."""
        return {
            "the number of backwards": str(self.rank.backwards.num),
            "the gradient of the last loss": self.rank.backwards.last_gradient,
            "the scale of the GradScaler": self.rank.loss_scale.words,
        }
