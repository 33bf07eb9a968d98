"""Searches plans in which ranks hold several stages each, in rounds or there and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autovaruna.planner.bounds.proof import WORTH
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.cost_table import Array
from autovaruna.planner.evaluator import Evaluator
from autovaruna.planner.placement import Ranks, in_a_row, layouts
from autovaruna.planner.search_space import FEWEST_GROUPS, MAX_UNITS, spread
from autovaruna.schedule.pipeline import share_of

Pattern = tuple[int, ...]

EVERY = 4
"""Up to so many rounds every number is worth a try, there and back too; of more, even numbers in turn are enough."""
_SHARE_OF_OWN = (0.25, 0.05)
"""What a stage's own seconds count beside those of its group, ever less: stages of very uneven sizes fill slowly."""
_WIDEST = 4.0
_FEW_STAGES = 8


def patterns(num_groups: int, most_each: int, num_stages: int = 0, more_than: int = 1) -> Iterator[Pattern]:
    """Yields patterns over so many groups with at most so many stages each, neighbours on different ones.

    Args:
        num_groups: K, 2 or more.
        most_each: the most stages of a group.
        num_stages: the only number of stages; 0: any.
        more_than: patterns of so many rounds and fewer are left out.
    """
    rounds = [
        each for each in range(more_than + 1, most_each + 1) if each <= EVERY or each in (most_each, each // 2 * 2)
    ]
    in_turn = [num_groups * each for each in rounds] + [num_groups + 1]
    for length in [num_stages] if num_stages else in_turn:
        if num_groups * more_than < length <= num_groups * most_each:
            yield tuple(stage % num_groups for stage in range(length))
    for each in range(more_than + 1, (most_each if num_stages else EVERY) + 1) if num_groups > 2 else ():
        length = each * (num_groups - 1) + 1
        if num_stages in (0, length) and each <= most_each:
            there = [*range(num_groups), *range(num_groups - 2, 0, -1)]
            yield tuple(there[stage % len(there)] for stage in range(length))


def cut_evenly(work: Array, loads: Sequence[float], pattern: Pattern) -> Iterator[tuple[int, ...]]:
    """Yields cuts that are ever more even between groups; with lumpy work the first ones have better stages.

    Those minimise the sum over stages of the squares of their own seconds. Then stages that follow each other on
    different groups are cut anew, run after run, each with all others of its group as they are: what that minimises
    never grows, while cutting all stages anew at once overshoots.

    Args:
        work: seconds of each segment.
        loads: for each group, how often its busiest rank works for one micro-batch of each rank.
        pattern: the group of each stage; no more stages than segments.
    """
    total = np.append(0.0, np.cumsum(work))
    n, num_stages = len(work), len(pattern)
    width = n if num_stages <= _FEW_STAGES else min(n, math.ceil(_WIDEST * n / num_stages) + 1)
    factors, groups = np.array([loads[group] for group in pattern]), np.array(pattern)
    ends = _least_squares(total, factors, np.zeros(num_stages), width, _SHARE_OF_OWN[0])
    if ends is None:
        return
    yield tuple(ends[:-1])
    known, windows = [ends], _windows(pattern)
    for share in _SHARE_OF_OWN:
        for first, end in windows:
            own = factors * np.diff(total[ends])
            others = (np.bincount(groups, own, len(loads))[groups] - own)[first:end]
            low, high = ends[first], ends[end]
            part = total[low : high + 1]
            inner = _least_squares(part, factors[first:end], others, min(width, high - low), share)
            ends = ends if inner is None else [*ends[:first], *(low + each for each in inner), *ends[end + 1 :]]
        if ends in known:
            return
        known.append(ends)
        yield tuple(ends[:-1])


def _windows(pattern: Pattern) -> list[tuple[int, int]]:
    """Returns runs of stages on different groups, each of which begins in the middle of the one before."""
    windows, first, end = [], 0, 0
    while end < len(pattern):
        end = first + 1
        while end < len(pattern) and pattern[end] not in pattern[first:end]:
            end += 1
        windows.append((first, end))
        first += max((end - first) // 2, 1)
    return windows


def _least_squares(total: Array, factors: Array, others: Array, width: int, share: float) -> list[int] | None:
    """Returns the ends of stages, and 0 before, with least sum of ``(own + others)^2 + share * own^2``."""
    n, num_stages = len(total) - 1, len(factors)
    rows = np.arange(n + 1)
    ends = np.minimum(rows[:, None] + 1 + np.arange(width)[None, :], n)
    own = np.where(rows[:, None] < ends, total[ends] - total[:, None], np.inf)
    seconds = {factor: factor * own for factor in {*factors.tolist()}}
    shares = {factor: share * each**2 for factor, each in seconds.items()}
    alone = {} if others.any() else {factor: each**2 + shares[factor] for factor, each in seconds.items()}
    padded = np.full(n + width + 1, np.inf)  # the best rest behind each end; rows past the end see infinities
    best, later = padded[: n + 1], np.lib.stride_tricks.sliding_window_view(padded[1:], width)[: n + 1]
    best[n] = 0.0
    choices, costs = [], np.empty_like(own)
    for stage in range(num_stages - 1, -1, -1):
        # Where the stage may start: the stages before and from here on have a segment each, and no more than the width.
        behind = num_stages - stage
        some = slice(max(stage, n - behind * width), max(min(n - behind, stage * width), 0) + 1)
        factor, each = float(factors[stage]), costs[some]
        if alone:
            np.add(alone[factor][some], later[some], out=each)
        else:
            np.add(seconds[factor][some], others[stage], out=each)
            np.square(each, out=each)
            each += shares[factor][some]
            each += later[some]
        columns = each.argmin(axis=1)
        found = each[np.arange(len(columns)), columns]
        best[:] = np.inf
        best[some] = found
        choices.append((some.start, columns))
    if not np.isfinite(best[0]):
        return None
    starts = [0]
    for first, columns in choices[::-1]:
        starts.append(min(starts[-1] + 1 + int(columns[starts[-1] - first]), n))
    return starts


_NEAR = 1.03
_BOUNDING = 0.35
"""The share of the time for simulations in which shapes may be bounded."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of ranks, the group of each stage, and M; `seconds` is about what a step takes, if all goes well."""

    seconds: float
    groups: Ranks
    pattern: Pattern
    num_micro_batches: int


class Interleaving:
    """Looks for plans with several stages a rank.

    Args:
        planner: of the problem.
        most_each: the most stages of a rank.
        forced_stages: the only number of stages; 0: any.
        order: all ranks, in the order in which groups get them.
        more_than: patterns of so many rounds and fewer are left out.
    """

    def __init__(
        self, planner: Planner, most_each: int, forced_stages: int, order: list[int], more_than: int = 1
    ) -> None:
        self.planner, self.problem = planner, planner.problem
        self.most_each, self.forced_stages, self.order, self.more_than = most_each, forced_stages, order, more_than

    def shapes(self, counts: list[int], known: Evaluator) -> list[Shape]:
        """Returns shapes of plans with one stage a rank, and even ones; what promises most first.

        Over many ranks those of plans come first: their seconds are of simulations, and know of memory.
        """
        best: dict[tuple[int, int], tuple[float, Ranks]] = {}
        for candidate in sorted(known.ranked, key=known.ranked.__getitem__):
            if len(candidate.ranks) >= FEWEST_GROUPS:
                key = len(candidate.ranks), candidate.num_micro_batches
                best.setdefault(key, (known.ranked[candidate], candidate.ranks))
        found = [
            shape for (_, count), (seconds, ranks) in best.items() for shape in self._shortened(ranks, count, seconds)
        ]
        grids = list(self._even_grids())
        even = [shape for count in counts for ranks in grids for shape in self._even(ranks, count)]
        if self.problem.cluster.num_ranks <= MAX_UNITS:
            return _varied(found + even)
        return _varied(found) + _varied(even)

    def _shortened(self, groups: Ranks, count: int, seconds: float) -> Iterator[Shape]:
        """Yields a shape for each pattern; it takes what one stage a rank takes, but for most of the fill."""
        sized, num_groups = self.planner.sized(count), len(groups)
        fill = float(sized.step_seconds.sum()) * (1 - 1 / num_groups) / max(self.problem.cluster.speeds)
        more = sized.overhead_seconds * share_of(count, len(groups[0]), 0)
        for pattern in self._patterns(groups):
            each = len(pattern) / num_groups
            yield Shape(seconds - fill * (1 - 1 / each) + more * (each - 1), groups, pattern, count)

    def _even_grids(self) -> Iterator[Ranks]:
        """Yields groups of equally many ranks, as many groups as leave few ranks over."""
        num_ranks, forced = self.problem.cluster.num_ranks, self.problem.constraints.num_replicas
        replicas = [forced] if forced else spread(1, num_ranks // FEWEST_GROUPS)
        numbers = {num_ranks // each for each in replicas}
        if not forced:
            numbers |= {each for each in range(FEWEST_GROUPS, num_ranks + 1) if num_ranks % each == 0}
        for number in sorted(numbers if num_ranks > MAX_UNITS or forced else range(FEWEST_GROUPS, num_ranks + 1)):
            yield in_a_row(self.problem, self.order, [forced or num_ranks // number] * number)

    def _even(self, groups: Ranks, count: int) -> Iterator[Shape]:
        """Yields a shape for each pattern; its seconds are even work, a short fill, overhead and optimizer."""
        sized, num_groups, fastest = self.planner.sized(count), len(groups), max(self.problem.cluster.speeds)
        work, loads = float(sized.step_seconds.sum()), self.loads(groups, count)
        even = work / sum(1.0 / load for load in loads) + sized.whole_optimizer_seconds / num_groups / fastest
        for pattern in self._patterns(groups):
            each = len(pattern) / num_groups
            fill = (work - work / num_groups) / each / fastest
            overhead = sized.overhead_seconds * (each * min(loads) * min(self.problem.cluster.speeds) + num_groups - 1)
            yield Shape(even + fill + overhead, groups, pattern, count)

    def _patterns(self, groups: Ranks) -> list[Pattern]:
        most = self.planner.tables.num_segments
        found = patterns(len(groups), self.most_each, self.forced_stages, self.more_than)
        return [each for each in found if len(each) <= most]

    def loads(self, groups: Ranks, count: int) -> list[float]:
        """Returns for each group the micro-batches of a rank over its speed, of the rank for which that is most."""
        speeds = self.problem.cluster.speeds
        if len(set(speeds)) == 1:
            return [share_of(count, len(group), 0) / speeds[0] for group in groups]
        return [max(share_of(count, len(g), k) / speeds[rank] for k, rank in enumerate(g)) for g in groups]

    def candidates(self, shape: Shape) -> Iterator[Candidate]:
        """Yields a shape with cuts that are even."""
        sized = self.planner.sized(shape.num_micro_batches)
        work = np.add.reduceat(sized.step_seconds, sized.tables.positions[:-1])
        ranks = tuple(shape.groups[group] for group in shape.pattern)
        for starts in cut_evenly(work, self.loads(shape.groups, shape.num_micro_batches), shape.pattern):
            yield Candidate(starts, ranks, shape.num_micro_batches)

    def try_shapes(self, counts: list[int], known: Evaluator, trials: Evaluator, most_seconds: float) -> None:
        """Simulates the shapes that may be faster than what is known, until that took so many seconds.

        What no schedule beats says more than a formula and costs less than a simulation: it sets the order.
        """
        start = self.planner.spent_seconds
        for least_bound, shape in self._by_bound(counts, known, start + most_seconds * _BOUNDING):
            if least_bound >= min(known.least_seconds * WORTH, trials.least_seconds):
                break
            for bound, candidate in self._laid_out(shape):
                least = min(known.least_seconds * WORTH, trials.least_seconds)
                if self.planner.spent_seconds > start + most_seconds:
                    trials.was_cut_short = True
                    return
                if bound < least:
                    trials.attempt(candidate, least * _NEAR)

    def _by_bound(self, counts: list[int], known: Evaluator, limit: float) -> list[tuple[float, Shape]]:
        """Returns the shapes that fit with their bounds, the least first, as many as are bounded by the limit."""
        found: list[tuple[float, Shape]] = []
        memory = max(self.problem.cluster.memory_bytes)
        for shape in self.shapes(counts, known):
            sized = self.planner.sized(shape.num_micro_batches)
            state = sized.model.fixed(sized.held_by(0, self.planner.tables.num_segments))
            if shape.seconds >= known.least_seconds * WORTH or state > memory * len(shape.groups):
                continue
            if self.planner.spent_seconds > limit and found:
                break
            bounds = (self._bound(candidate) for candidate in self.candidates(shape))
            found.append((next((bound for bound in bounds if bound < math.inf), math.inf), shape))
        return sorted((pair for pair in found if pair[0] < math.inf), key=lambda pair: pair[0])

    def _bound(self, candidate: Candidate) -> float:
        """Returns what no schedule of a candidate beats; infinite if it does not fit."""
        self.planner.count_candidate()
        plan = self.planner.build(candidate)
        return self.planner.bound(plan) if plan else math.inf

    def _laid_out(self, shape: Shape) -> list[tuple[float, Candidate]]:
        """Returns the first cuts of a shape in every layout over hosts, with their bounds in order."""
        first, others = next(self.candidates(shape)), layouts(self.problem, self.order, [*map(len, shape.groups)])
        places = [tuple(groups[group] for group in shape.pattern) for groups in others if groups != shape.groups]
        found = [first, *(replace(first, ranks=ranks) for ranks in places)]
        return sorted(((self._bound(each), each) for each in found), key=lambda pair: pair[0])

    def even_out(self, trials: Evaluator, most: int) -> None:
        """Simulates the best candidates with cuts that are more even between groups."""
        for candidate in trials.best_few(most):
            groups = tuple(dict.fromkeys(candidate.ranks))
            pattern = tuple(map(groups.index, candidate.ranks))
            for other in self.candidates(Shape(0.0, groups, pattern, candidate.num_micro_batches)):
                trials.attempt(other, trials.ranked[candidate])


def _varied(shapes: list[Shape]) -> list[Shape]:
    """Returns the best shape of each number of stages a rank, then the next best of each, and so on."""
    turns: dict[float, int] = {}
    keyed = []
    for number, shape in enumerate(sorted(shapes, key=lambda shape: shape.seconds)):
        each = len(shape.pattern) / len(shape.groups)
        kind = each if each == int(each) else math.inf
        turns[kind] = turns.get(kind, -1) + 1
        keyed.append((turns[kind], kind, number, shape))
    return [shape for *_, shape in sorted(keyed, key=lambda key: key[:3])]
