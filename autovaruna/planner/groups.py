"""Goes through every plan of a small problem in the order of a bound, whatever the speeds, hosts and memory of ranks.

Ranks of one host, speed and memory limit are interchangeable: they form a class, and a stage is known by its range of
segments and its group, the number of its ranks of each class. Every range on every group has a least time (bound.py
says why). Dynamic programming over (ranks left, first segment) finds the least that the rest of a plan can take; a
search with that as its guide (A*) then meets complete plans in the order of their bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count, permutations, product
from math import prod

import numpy as np

from autovaruna.planner.bounds.range_seconds import RangeSeconds
from autovaruna.planner.candidate import Candidate
from autovaruna.planner.costs import Array
from autovaruna.planner.placing import Ranks, classes_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.sized import Sized

Group = tuple[int, ...]
"""The number of ranks of each class."""

_CELLS = 2 * 10**6
_FEW_RANKS = 16
_ROUNDING = 1e-9


def is_small(problem: Problem, num_segments: int) -> bool:
    """Returns whether the tables over all groups are small enough: few classes, ranks and segments."""
    cluster = problem.cluster
    if problem.constraints.stage_ranks or cluster.num_ranks > _FEW_RANKS:
        return False
    pairs = prod((held + 1) * (held + 2) // 2 for held in Counter(classes_of(cluster)).values())
    return pairs * (num_segments + 1) ** 2 <= _CELLS


class GroupSearch:
    """All plans of one number of micro-batches, by groups; `least_seconds` is a proven bound on all of them."""

    def __init__(self, sized: Sized, forced_stages: int) -> None:
        self.sized, self.forced_stages = sized, forced_stages
        self.num_segments = sized.tables.num_segments
        classes = classes_of(sized.problem.cluster)
        self.members = [[r for r, kind in enumerate(classes) if kind == each] for each in range(max(classes) + 1)]
        self.all = tuple(len(members) for members in self.members)
        self.costs = self._costs()
        self.least = self._least()

    @property
    def least_seconds(self) -> float:
        """No plan with so many micro-batches takes less."""
        return float(self.least[self.all][0]) * (1.0 - _ROUNDING)

    def _costs(self) -> dict[Group, Array]:
        forced = self.sized.problem.constraints.num_replicas
        groups = [group for group in _subgroups(self.all) if sum(group) and forced in (0, sum(group))]
        waits = RangeSeconds(self.sized).waits
        return {g: RangeSeconds(self.sized, self.ranks_of(g), waits).stage_seconds(sum(g)) for g in groups}

    def ranks_of(self, group: Group) -> list[int]:
        """Returns ranks that make such a group."""
        return [rank for members, held in zip(self.members, group, strict=True) for rank in members[:held]]

    def _least(self) -> dict[Group, Array]:
        """Returns, for the ranks that are left, the least greatest cost of stages from each segment to the end."""
        n = self.num_segments
        least: dict[Group, Array] = {}
        for left in _subgroups(self.all):
            best = np.full(n + 1, np.inf)
            best[n] = 0.0
            for group, rest in self.taken(left):
                best[:n] = np.minimum(best[:n], np.maximum(self.costs[group][:n], least[rest][None, :]).min(axis=1))
            least[left] = best
        return least

    def taken(self, left: Group) -> Iterator[tuple[Group, Group]]:
        """Yields each group that a stage may take, with what is left then."""
        for group in self.costs:
            rest = tuple(has - takes for has, takes in zip(left, group, strict=True))
            if min(rest) >= 0:
                yield group, rest

    def in_order(self) -> Iterator[tuple[float, Candidate]]:
        """Yields (bound, candidate), the least bound first.

        Ranks of one class are taken in their order; within a stage every order of classes is a candidate of its own.
        """
        number, n = count(), self.num_segments
        queue: list[tuple[float, int, int, tuple[int, ...], tuple[Group, ...], Group]] = []
        heappush(queue, (self.least_seconds, 0, next(number), (), (), self.all))
        while queue:
            seconds, minus_at, _, starts, groups, left = heappop(queue)
            at = -minus_at  # Of equal bounds, what is nearest to its end comes first.
            if at == n:
                for ranks in self.orders(groups):
                    yield seconds, Candidate(starts, ranks, self.sized.num_micro_batches)
                continue
            for group, rest in self.taken(left):
                reached = np.maximum(np.maximum(self.costs[group][at], self.least[rest]), seconds)
                for end in np.flatnonzero(np.isfinite(reached)):
                    if self._may_have(len(starts) + 1, int(end)):
                        item = (float(reached[end]), -int(end), next(number), (*starts, at), (*groups, group), rest)
                        heappush(queue, item)

    def _may_have(self, stages: int, end: int) -> bool:
        """Returns whether a plan whose first stages end there can have the forced number of stages."""
        more = self.forced_stages - stages
        is_right = (end == self.num_segments) == (more == 0) and 0 <= more <= self.num_segments - end
        return is_right or not self.forced_stages

    def orders(self, groups: tuple[Group, ...]) -> Iterator[Ranks]:
        """Yields the ranks of groups that are apart: within each group, those of several classes in every order."""
        taken, choices = [0] * len(self.all), []
        for group in groups:
            ranks: list[int] = []
            for kind, held in enumerate(group):
                ranks += self.members[kind][taken[kind] : taken[kind] + held]
                taken[kind] += held
            choices.append(self._orders_of(ranks))
        return product(*choices)

    def _orders_of(self, ranks: list[int]) -> list[tuple[int, ...]]:
        """Returns the orders of a stage's ranks, those of one class always in their own order."""
        kinds = {rank: kind for kind, members in enumerate(self.members) for rank in members}
        patterns = dict.fromkeys(permutations([kinds[rank] for rank in ranks])) if len(set(kinds.values())) > 1 else {}
        found = []
        for pattern in patterns:
            own = {kind: iter([rank for rank in ranks if kinds[rank] == kind]) for kind in set(pattern)}
            found.append(tuple(next(own[kind]) for kind in pattern))
        return found or [tuple(ranks)]


def _subgroups(group: Group) -> Iterator[Group]:
    """Yields every group within this one, each after those within it."""
    return product(*(range(held + 1) for held in group))
