"""Goes through all plans of a small problem: groups of uneven ranks with one stage each, then with several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, permutations, product
from math import prod

import numpy as np

from autovaruna.planner.bounds.range_bounds import RangeSeconds, fastest_link, waits_of
from autovaruna.planner.candidate import Candidate
from autovaruna.planner.cost_table import Array
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.placement import Ranks, classes_of
from autovaruna.planner.problem import Problem
from autovaruna.schedule.pipeline import share_of

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

    def __init__(self, sized: SizedProblem, forced_stages: int) -> None:
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


@dataclass(frozen=True, slots=True)
class _Open:
    """A group with stages.

    Attributes:
        ranks: its ranks of each class.
        first: where its first stage starts.
        work, optimizer: seconds of all its stages together, for one micro-batch and for a step, at speed 1.
        num_stages: how many.
    """

    ranks: Group
    first: int
    work: float = 0.0
    optimizer: float = 0.0
    num_stages: int = 0


class PatternSearch:
    """All plans of one number of micro-batches with several stages a rank.

    Args:
        search: all plans with one stage a rank; knows ranks, and stages alone.
        most_each: the most stages of a group.
        limit: says at any time how many seconds are too many.
        count: is called for each stage that is tried; no more are once it returns False.
    """

    def __init__(
        self, search: GroupSearch, most_each: int, limit: Callable[[], float], count: Callable[[], bool]
    ) -> None:
        self.search, self.sized, self.most_each = search, search.sized, most_each
        self.limit, self.count, self.is_complete = limit, count, True
        positions, self.n = self.sized.tables.positions, self.sized.tables.num_segments
        waits, cluster = waits_of(self.sized), self.sized.problem.cluster
        # A rank may begin with any of its stages, and end with any; where neighbours have nothing to do with each
        # other, a message may come from a stage of the same rank, in no time.
        slack = fastest_link(cluster).latency_seconds
        before, after = (_least_from(np.maximum(wait - slack, 0.0)[positions]) for wait in (waits.before, waits.after))
        self.before, self.after, self.slack = before, after, 2 * slack
        self.ends = np.append(0.0, np.cumsum(self.sized.step_seconds))[positions]
        self.loads = {group: self._load(group) for group in search.costs}

    def _load(self, group: Group) -> tuple[float, int, float, float]:
        """Returns, of a group: M' over speed and M' of the rank that works longest, the speed of all, and the most."""
        speeds = [self.sized.problem.cluster.speeds[rank] for rank in self.search.ranks_of(group)]
        speeds.sort(reverse=True)
        shares = [share_of(self.sized.num_micro_batches, len(speeds), k) for k in range(len(speeds))]
        load, share = max((share / speed, share) for share, speed in zip(shares, speeds, strict=True))
        return load, share, sum(speeds), speeds[0]

    def candidates(self) -> Iterator[Candidate]:
        """Yields every plan whose bound is below the limit."""
        return self._extend((0,), (), (), self.search.all)

    def _extend(
        self, starts: tuple[int, ...], pattern: tuple[int, ...], groups: tuple[_Open, ...], left: Group
    ) -> Iterator[Candidate]:
        """Lays the stage that starts at the last of `starts` on each group."""
        at = starts[-1]
        for number, group, rest in self._choices(pattern, groups, left):
            costs = self.search.costs[group.ranks][at] - self.slack
            for end in range(at + 1, self.n + 1):
                if not self.count():
                    self.is_complete = False
                    return
                grown = self._grown(group, at, end)
                if self._seconds(grown) >= self.limit():
                    break
                opened = (*groups[:number], grown, *groups[number + 1 :])
                if costs[end] < self.limit() and self._has_room(end, opened, rest):
                    yield from self._go_on(starts, (*pattern, number), opened, rest, end)

    def _go_on(
        self, starts: tuple[int, ...], pattern: tuple[int, ...], groups: tuple[_Open, ...], left: Group, end: int
    ) -> Iterator[Candidate]:
        forced = self.search.forced_stages
        if end < self.n:
            if not forced or len(starts) < forced:
                yield from self._extend((*starts, end), pattern, groups, left)
        elif len(groups) < len(pattern) and forced in (0, len(starts)):
            for ranks in self.search.orders(tuple(group.ranks for group in groups)):
                placed = tuple(ranks[number] for number in pattern)
                yield Candidate(starts, placed, self.sized.num_micro_batches)

    def _choices(
        self, pattern: tuple[int, ...], groups: tuple[_Open, ...], left: Group
    ) -> Iterator[tuple[int, _Open, Group]]:
        """Yields each group that may hold the next stage, by its number, with the ranks that are then left."""
        for number, group in enumerate(groups):
            if number != pattern[-1] and group.num_stages < self.most_each:
                yield number, group, left
        for ranks, rest in self.search.taken(left):
            yield len(groups), _Open(ranks, -1), rest

    def _grown(self, group: _Open, at: int, end: int) -> _Open:
        work = group.work + float(self.ends[end] - self.ends[at])
        optimizer = group.optimizer + float(self.sized.optimizer_seconds[at, end])
        return _Open(group.ranks, at if group.first < 0 else group.first, work, optimizer, group.num_stages + 1)

    def _seconds(self, group: _Open) -> float:
        """Returns the least seconds of a group."""
        load, share, _, fastest = self.loads[group.ranks]
        busy = load * group.work + share * group.num_stages * self.sized.overhead_seconds
        return float(self.before[group.first] + busy + max(self.after[group.first], group.optimizer / fastest))

    def _has_room(self, end: int, groups: tuple[_Open, ...], left: Group) -> bool:
        """Returns whether the blocks from `end` on fit into the time that is left."""
        limit, count = self.limit(), self.sized.num_micro_batches
        if np.isinf(limit) or end == self.n:
            return True
        speeds, members = self.sized.problem.cluster.speeds, self.search.members
        speed = sum(has * speeds[ranks[0]] for has, ranks in zip(left, members, strict=True))
        room = speed * (limit - self.before[end] - self.after[end])
        for group in groups:
            if group.num_stages < self.most_each:
                idle = self.before[group.first] + self.after[group.first]
                room += max(self.loads[group.ranks][2] * (limit - idle) - count * group.work, 0.0)
        return bool(count * (self.ends[self.n] - self.ends[end]) <= room * (1 + _ROUNDING))


def _least_from(waits: Array) -> Array:
    """Returns the least of the waits at each position or a later one; at the end, nothing."""
    return np.append(np.minimum.accumulate(waits[:-1][::-1])[::-1], 0.0)
