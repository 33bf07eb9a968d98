"""Collects the gradients of a step: sums them over the uses of a parameter and over the ranks that hold it.

A parameter has one accumulator for each block that uses it. They are summed from the last use to the first, the order
of autograd on one process, whatever stages the uses are on: of a parameter of several stages a partial sum travels from
the last to the first, and the total goes back to all; or to its owner, where the optimizer's state is shared out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autovaruna.planner.costs import EARLY_BYTES
from autovaruna.planner.records import Plan
from autovaruna.ranks.buckets import GradientSums
from autovaruna.ranks.world import World
from autovaruna.runtime.mail import PARAMETER_TAG
from autovaruna.runtime.remote_parameter import RemoteTensor, show_remote_gradients
from autovaruna.runtime.weights import OwnedState, Placement, show_gradients_of_owners, steps_here
from autovaruna.stage.module import ParameterUse, StageModule
from autovaruna.stage.split import Split

Key = TypeVar("Key")


@dataclass(frozen=True)
class StageUse:
    """One use of a parameter: the block, its stage, and the ranks of that stage."""

    block: int
    stage: int
    ranks: tuple[int, ...]


@dataclass(eq=False)
class SumRun:
    """Parameters of a stage whose sums start together, each with all its uses, the last first."""

    stage: int
    uses: dict[str, list[StageUse]]
    num_bytes: int = 0


class SumOrder:
    """The parameters of one rank that get a gradient, in the order in which they are summed.

    The parameters of a stage are summed over its replicas run by run, in the order in which a backward comes to the end
    of them. Where several stages have the same ranks, the later ones come first, on every rank.

    Args:
        uses: The parameters of this rank, each with all its uses that get a gradient, the last first.
        holders: The ranks that hold each of them: a use without a gradient, and another graph, may need it elsewhere.
        are_apart: Whether ranks are of several hosts.

    Attributes:
        over_stages: the uses of those that several stages use, or ranks without a gradient hold, and who gets the sum.
        runs: those of the others, by the ranks that sum them.
        early: by use the runs that need not wait for their stage, of several hosts: messages leave processors free.
    """

    def __init__(
        self,
        uses: Mapping[str, list[StageUse]],
        holders: Mapping[str, tuple[int, ...]],
        owners: Mapping[str, int],
        num_bytes: Mapping[str, int],
        are_apart: Callable[[tuple[int, ...]], bool],
    ) -> None:
        self.owners = owners
        self.over_stages: dict[str, tuple[list[StageUse], tuple[int, ...]]] = {}
        self.runs: dict[tuple[int, ...], list[SumRun]] = {}
        self.early: dict[ParameterUse, SumRun] = {}
        for name, each in uses.items():
            if len({use.stage for use in each}) > 1 or set(holders[name]) != set(each[0].ranks):
                receivers = {each[-1].ranks[0], owners[name]} if name in owners else holders[name]
                self.over_stages[name] = each, tuple(sorted(receivers))
        for name, each in sorted(uses.items(), key=lambda item: (-item[1][0].stage, -item[1][-1].block)):
            if name in self.over_stages:
                continue
            runs, stage = self.runs.setdefault(each[0].ranks, []), each[0].stage
            is_apart = are_apart(each[0].ranks)
            if not runs or runs[-1].stage != stage or (is_apart and runs[-1].num_bytes >= EARLY_BYTES):
                runs.append(SumRun(stage, {}))
            runs[-1].uses[name] = each
            runs[-1].num_bytes += num_bytes[name]
            self.early |= {(name, use.block): runs[-1] for use in each if is_apart}
        self.num_early = Counter(self.early.values())


class Summation:
    """Sums the gradients of one step, each run from when it is there, or its stage's last backward has ended."""

    def __init__(self, order: SumOrder, world: World, parameters: Mapping[str, nn.Parameter]) -> None:
        self._order, self._world, self._parameters = order, world, parameters
        self._sums = GradientSums(world)
        self._totals: dict[str, Tensor] = {}
        self._accumulators: dict[ParameterUse, Tensor] = {}
        self._coming = {ranks: deque(runs) for ranks, runs in order.runs.items()}
        self._missing = dict(order.num_early)
        self._ended: set[int] = set()

    def take(self, use: ParameterUse, accumulator: Tensor) -> None:
        """Starts the sums of a run, given the last of its accumulators; lets others advance; never blocks."""
        assert use not in self._accumulators, f"{use} has its gradient twice"
        self._accumulators[use] = accumulator
        run = self._order.early[use]
        self._missing[run] -= 1
        if not self._missing[run]:
            self._start()
        self._world.poll()
        self._sums.start()

    def end_stage(self, stage: int, accumulators: Mapping[ParameterUse, Tensor]) -> None:
        """Starts the sums of a stage, given its accumulators; never blocks."""
        self._accumulators.update(accumulators)
        self._ended.add(stage)
        self._start()

    def finish(self, accumulators: Mapping[ParameterUse, Tensor]) -> dict[str, Tensor]:
        """Sums what is left and waits for everything; returns the gradient of each parameter that this rank gets."""
        self._accumulators.update(accumulators)
        self._ended.update(run.stage for runs in self._coming.values() for run in runs)
        self._start()
        self._sums.finish()  # how many have started differs from rank to rank, and a chain sums among the same
        for name, (uses, _) in self._order.over_stages.items():
            self._totals[name] = self._chain(name, uses)
        owners, rank = self._order.owners, self._world.rank
        for name, (uses, ranks) in self._order.over_stages.items():
            if len(ranks) > 1 and rank in ranks:
                self._world.broadcast(self._totals[name], uses[-1].ranks[0], ranks)
        return {name: total for name, total in self._totals.items() if owners.get(name, rank) == rank}

    def _start(self) -> None:
        for ranks, runs in self._coming.items():
            while runs and (runs[0].stage in self._ended or self._missing.get(runs[0]) == 0):
                self._add(runs.popleft(), ranks)
                self._sums.start()

    def _add(self, run: SumRun, ranks: tuple[int, ...]) -> None:
        """Adds up the uses of each parameter of a run; where the stage has replicas, their totals are summed."""
        for name, (first, *others) in run.uses.items():
            total = self._pop(name, first)
            for use in others:
                total.add_(self._pop(name, use))
            if len(ranks) > 1:
                is_contiguous = self._parameters[name].is_contiguous()
                total = total.contiguous() if is_contiguous else total
                self._sums.add(total, ranks, is_contiguous=is_contiguous, owner=self._order.owners.get(name))
            self._totals[name] = total

    def _pop(self, name: str, use: StageUse) -> Tensor:
        """Returns an accumulator; a replica that had no micro-batch adds zeros."""
        found = self._accumulators.pop((name, use.block), None)
        return found if found is not None else torch.zeros_like(self._parameters[name])

    def _chain(self, name: str, uses: list[StageUse]) -> Tensor:
        """Sums a parameter over the stages that use it; the total is on the first rank of the first one."""
        runs = [list(run) for _, run in groupby(uses, key=attrgetter("stage"))]
        mine = [use for use in uses if self._world.rank in use.ranks]
        parts = {use.block: self._pop(name, use) for use in mine}
        for use in mine:
            if len(use.ranks) > 1:
                self._world.all_reduce(parts[use.block], use.ranks)
        heads = [run[0].ranks[0] for run in runs]
        total: Tensor | None = None
        for place, run in enumerate(runs):
            if heads[place] != self._world.rank:
                continue
            before = heads[place - 1] if place else self._world.rank
            if before != self._world.rank:
                total = torch.empty_like(self._parameters[name])
                self._world.receive([total], before, PARAMETER_TAG).wait()
            for use in run:
                total = parts[use.block] if total is None else total.add_(parts[use.block])
            after = heads[place + 1] if place + 1 < len(runs) else self._world.rank
            if after != self._world.rank:
                assert total is not None, "a run has a use"
                self._world.send([total], after, PARAMETER_TAG).wait()
        return total if total is not None else torch.empty_like(self._parameters[name])


def _use(split: Split, plan: Plan, block: int) -> StageUse:
    node = split.traced.graph.blocks[block].nodes[0]
    stage = split.assignment.stage_of[node]
    return StageUse(block, stage, plan.stages[stage].ranks)


class GradientBook:
    """Collects the gradients of a split's stages, sums them, and keeps back what is not to be summed yet.

    `may_have_kept` says whether some rank may keep gradients back; `early` are the uses whose sums may begin in a
    backward of the step that has begun.
    """

    def __init__(
        self,
        split: Split,
        plan: Plan,
        world: World,
        parameters: Mapping[str, nn.Parameter],
        placement: Placement,
        stages: Sequence[StageModule],
    ) -> None:
        self._world, self._parameters, self._placement, self._stages = world, parameters, placement, stages
        self._uses = {
            parameter.name: [_use(split, plan, block) for block in reversed(parameter.blocks)]
            for parameter in split.traced.graph.parameters
            if parameter.needs_gradient
        }
        self._orders: dict[str | None, SumOrder] = {}
        self._varies = split.traced.has_kept_modules
        self._kept: dict[ParameterUse, Tensor] = {}
        self.may_have_kept = False
        self._begun: Summation | None = None
        self.early: Mapping[ParameterUse, SumRun] = {}
        self._hooks: list[RemovableHandle] = []

    def begin(self, root_names: str, *, is_summed: bool) -> None:
        """Begins a step; its gradients are summed stage by stage, if they are and ranks know what they will sum."""
        self.may_have_kept |= not is_summed
        order = self._orders.get(root_names) if is_summed and not self._varies else None
        self._begun = None if order is None else Summation(order, self._world, self._parameters)
        self.early = {} if order is None else order.early

    def follow(self, stage: StageModule) -> None:
        """Starts sums of a stage while its last backward on this rank, which comes next, makes their gradients.

        On the host alone: a device's backward runs in a thread of its own, and its sums beside the next stage's.
        """
        for use, leaf in stage.leaves.items():
            if leaf.is_cpu and use in self.early:
                hand_over = partial(_hand_over, self._begun, use)
                self._hooks.append(leaf.register_post_accumulate_grad_hook(hand_over))  # type: ignore[no-untyped-call]

    def end_stage(self, stage: int) -> None:
        """Starts the sums of a stage whose last gradients on this rank are there; never blocks."""
        if self._hooks:
            self._unfollow()
        if self._begun is not None:
            self._begun.end_stage(stage, _pop_gradients([each for each in self._stages if each.index == stage]))

    def pop(self) -> dict[ParameterUse, Tensor]:
        """Returns the gradients of the last step, by use; the leaves keep none."""
        return _pop_gradients(self._stages)

    def keep(self, accumulators: Mapping[ParameterUse, Tensor]) -> None:
        """Keeps gradients of this rank back until the next `pop_kept`."""
        _add_to(self._kept, accumulators)

    def drop_kept(self, names: Container[str]) -> None:
        self._kept = {use: each for use, each in self._kept.items() if use[0] not in names}

    def total(self, accumulators: Mapping[ParameterUse, Tensor], root_names: str | None) -> dict[str, Tensor]:
        """Returns the gradients of the global batch, of each parameter of this rank that no other rank owns.

        `begin` may have started some sums. Collective for ranks that hold a stage.

        Args:
            accumulators: This rank's; they are overwritten.
            root_names: What the backward started from; None: several, so that ranks must agree anew.
        """
        summation, self._begun = self._begun, None
        if summation is None or root_names is None:
            summation = Summation(self._agree(accumulators, root_names), self._world, self._parameters)
        return summation.finish(accumulators)

    def pop_kept(self) -> dict[str, Tensor]:
        """Sums what was kept back. Collective."""
        if not self.may_have_kept:
            return {}
        kept, self._kept, self.may_have_kept = self._kept, {}, False
        is_any = self._world.is_on_any(bool(kept), "summing kept gradients")
        return self.total(kept, None) if is_any else {}

    def forget_step(self) -> None:
        """Drops what a step that has failed leaves behind."""
        self._begun = None
        self._unfollow()
        _pop_gradients(self._stages)

    def _unfollow(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _agree(self, accumulators: Mapping[ParameterUse, Tensor], root_names: str | None) -> SumOrder:
        """Returns what is summed: all that has a gradient on any rank. Collective, once a set of roots.

        Where a call goes backward from the same outputs, its graph gives the same parameters a gradient, unless a
        module that is kept whole chooses among its own.
        """
        root_names = None if self._varies else root_names
        if root_names in self._orders:
            return self._orders[root_names]
        every = [(name, use.block) for name, uses in self._uses.items() for use in uses]
        here = np.packbits(np.array([use in accumulators for use in every], bool)).tobytes()
        rows = self._world.exchange("agreeing on gradients", block=here).blocks()
        bits = np.bitwise_or.reduce([np.frombuffer(row, np.uint8) for row in dict.fromkeys(rows)])
        agreed = {use for use, has in zip(every, np.unpackbits(bits, count=len(every)), strict=True) if has}
        live = {name: [use for use in uses if (name, use.block) in agreed] for name, uses in self._uses.items()}
        holders = {name: self._placement.ranks_of(name) for name, uses in live.items() if uses}
        own = {name: live[name] for name in holders if self._world.rank in holders[name]}
        num_bytes = {name: self._parameters[name].nbytes for name in own}
        order = SumOrder(own, holders, self._placement.owners, num_bytes, self._world.transport.are_apart)
        if root_names is not None:
            self._orders[root_names] = order
        return order


class Backwards:
    """Counts the caller's backwards through one model, and sums the gradients that they have kept back.

    `books` are those of the model's graphs, as they come; `last_gradient` came into the last of `num` backwards, which
    `owes_gradients` if it has kept them back.
    """

    def __init__(self, state: OwnedState, books: Sequence[GradientBook]) -> None:
        self.num, self.last_gradient = 0, "none"
        self._state, self._books = state, books
        self.owes_gradients = False
        self._totals: dict[str, Tensor] = {}

    def record(self, gradient: str) -> None:
        """Counts a backward, by what came into it."""
        self.num += 1
        self.last_gradient = gradient

    def show_gradients_elsewhere(self, is_summed: bool) -> None:
        """Sets ``.grad`` of parameters whose gradient other ranks have to a tensor without numbers."""
        self.owes_gradients = not is_summed
        if is_summed:
            show_remote_gradients(self._remote)
            show_gradients_of_owners(self._of_others)

    def synchronise(self) -> None:
        """Adds the gradients that were kept back, and shows those of other ranks. Collective."""
        self.add_kept()
        if self.owes_gradients:
            self.show_gradients_elsewhere(True)

    def add_kept(self) -> None:
        """Sums the gradients that were kept back and adds them to ``.grad``, as a backward of theirs. Collective."""
        kept, parameters = self._kept(), self._state.parameters()
        trained = [name for name in kept if parameters[name].requires_grad]
        if trained:
            torch.autograd.backward([parameters[name] for name in trained], [kept.pop(name) for name in trained])
        for name, total in kept.items():  # frozen since
            gradient = parameters[name].grad
            parameters[name].grad = total if gradient is None else gradient.add_(total)

    def keep_totals(self, totals: Mapping[str, Tensor]) -> None:
        """Keeps back gradients that have been summed in the call, by parameter."""
        _add_to(self._totals, totals)

    def drop_kept(self, names: Container[str]) -> None:
        """Drops what was kept back of some parameters, as `zero_grad` does with their gradients."""
        self._totals = {name: total for name, total in self._totals.items() if name not in names}
        for book in self._books:
            book.drop_kept(names)

    def forget_step(self) -> None:
        for book in self._books:
            book.forget_step()

    def _kept(self) -> dict[str, Tensor]:
        """Sums the gradients that were kept back and returns them by parameter. Collective."""
        totals, self._totals = self._totals, {}
        for book in self._books:
            _add_to(totals, book.pop_kept())
        return totals

    @cached_property
    def _of_others(self) -> list[nn.Parameter]:
        """The parameters that this rank holds and another one steps over."""
        others = [each for each in self._state.parameters().values() if not steps_here(each)]
        return [each for each in others if not isinstance(each, RemoteTensor)]

    @cached_property
    def _remote(self) -> list[RemoteTensor]:
        return [each for each in self._state.parameters().values() if isinstance(each, RemoteTensor)]


def _add_to(totals: dict[Key, Tensor], others: Mapping[Key, Tensor]) -> None:
    for key, other in others.items():
        totals[key] = totals[key].add_(other) if key in totals else other


def _hand_over(summation: Summation | None, use: ParameterUse, leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    assert summation is not None and gradient is not None, "a backward of a step with sums has made it"
    summation.take(use, gradient)


def _pop_gradients(stages: Iterable[StageModule]) -> dict[ParameterUse, Tensor]:
    found: dict[ParameterUse, Tensor] = {}
    for stage in stages:
        for use, leaf in stage.leaves.items():
            if leaf.grad is not None:
                found[use], leaf.grad = leaf.grad, None
    return found
