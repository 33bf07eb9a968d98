"""Goes through every plan of a small problem in which groups of ranks hold several stages each.

A group is some ranks; it holds up to v stages, neighbours are on different groups. Stages are laid down from the first
to the last, each on a group that is open or on a new one. A group cannot end sooner than its wait before the first of
its stages, its work of all of them, and its wait after; a stage no sooner than the bound of a stage alone says
(bound.py); and what is left must fit into the time that all ranks have left. What breaks one of these is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.bounds.waits import fastest_link, waits_of
from autovaruna.planner.candidate import Candidate
from autovaruna.planner.costs import Array
from autovaruna.planner.groups import Group, GroupSearch
from autovaruna.schedule.slices import share_of

_ROUNDING = 1e-9


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
