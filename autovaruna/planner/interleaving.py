"""Searches plans in which ranks hold several stages each, starting from the groups of ranks of plans with one.

A group is the ranks of one stage; a plan with K groups gives each of them several stages of a pattern (rounds.py).
What fills the pipeline is shorter then, and so is a step whose micro-batches are not many more than its stages. More
messages and instructions are what that costs, so every plan is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autovaruna.planner.bounds.proof import WORTH
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.options import FEWEST_GROUPS, MAX_UNITS, spread
from autovaruna.planner.placing import Ranks, in_a_row, layouts
from autovaruna.planner.rounds import Pattern, cut_evenly, patterns
from autovaruna.planner.trials import Trials
from autovaruna.schedule.slices import share_of

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

    def shapes(self, counts: list[int], known: Trials) -> list[Shape]:
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

    def try_shapes(self, counts: list[int], known: Trials, trials: Trials, most_seconds: float) -> None:
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

    def _by_bound(self, counts: list[int], known: Trials, limit: float) -> list[tuple[float, Shape]]:
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

    def even_out(self, trials: Trials, most: int) -> None:
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
