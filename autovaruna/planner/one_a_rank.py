"""Yields candidates with one stage a rank: on ranks that are given, regular grids, unequal replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from autovaruna.planner.arrays import Array
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import NEAR_OF_A_FORMULA, Evaluator, Trial
from autovaruna.planner.partition import cut_for_ranks, even_starts, put_before
from autovaruna.planner.problem import FEW_RANKS, Problem, forced_stages, micro_batch_range
from autovaruna.planner.search_space import (
    layouts,
    micro_batch_counts,
    rank_orders,
    spread,
    stage_limit,
)
from autovaruna.schedule.pipeline import share_of

_MOST_GRIDS = 24
"""Up to so many stages every number of them is tried; of more, some that are evenly spaced in ratio."""
_CELLS = 10**7
"""Of the tables in which the formula finds cuts: with more it is used where it has to be."""


def on_given_ranks(evaluator: Evaluator) -> Iterator[Trial]:
    """Yields the best cuts for ranks that the user has given to the stages, for each M."""
    problem = evaluator.planner.problem
    for count in micro_batch_counts(problem):
        if candidate := cut_for_ranks(evaluator.planner, count, problem.constraints.stage_ranks):
            yield candidate, math.inf


class Grid(NamedTuple):
    """A regular grid: S stages of equally many replicas, and M."""

    num_stages: int
    num_replicas: int
    num_micro_batches: int


def grids(evaluator: Evaluator, every: Iterable[Grid], near: float, most_acts: float = math.inf) -> Iterator[Trial]:
    """Yields regular grids whose even stages may come near the best, in several orders and layouts of ranks.

    The best come first, with even cuts, and others by the formula, for the first layout of an order; where that takes
    long, even cuts are enough if they fit. What takes more than `most_acts` to simulate is left out.
    """
    planner = evaluator.planner
    for grid in sorted(every, key=lambda grid: even_seconds(planner, grid)):
        num_stages, _, count = grid
        is_open = even_seconds(planner, grid) < evaluator.least_seconds * near
        candidates = _cut(planner, grid) if is_open and num_stages >= _fewest_stages(planner, count) else []
        if candidates and planner.acts_of(candidates[0]) <= most_acts:
            below = evaluator.least_seconds * near
            for candidate in candidates:
                yield candidate, below
                below = min(below, evaluator.seconds_of(candidate))


def _cut(planner: Planner, grid: Grid) -> list[Candidate]:
    num_stages, replicas, count = grid
    even = even_starts(planner.tables.prefix(planner.sized(count).step_seconds), num_stages)
    is_quick = num_stages * planner.tables.num_segments**2 <= _CELLS
    found = list[Candidate]()
    for order in rank_orders(planner.problem):
        places = layouts(planner.problem, order, [replicas] * num_stages)
        is_enough = not is_quick and planner.build(Candidate(even, places[0], count))
        suited = None if is_enough else cut_for_ranks(planner, count, places[0])
        for starts in (even, suited.starts) if suited else (even,):
            found += [Candidate(starts, ranks, count) for ranks in places]
    return list(dict.fromkeys(found))


def grids_of(problem: Problem, num_segments: int) -> list[Grid]:
    """Returns all regular grids with one stage a rank.

    Replicas are as many as there are ranks and samples for; micro-batches are of 1, 2, 4, ... samples.
    """
    forced, most = forced_stages(problem), stage_limit(problem, num_segments)
    num_ranks, replicas = problem.cluster.num_ranks, problem.constraints.num_replicas
    high, found = micro_batch_range(problem)[1], set[Grid]()
    for num_stages in [forced] if forced else _spread(most, num_ranks):
        each = replicas or min(num_ranks // num_stages, high)
        if each and each * num_stages <= num_ranks:
            found |= {Grid(num_stages, each, count) for count in even_counts(problem, each)}
    return sorted(found)


def _spread(most: int, num_ranks: int) -> list[int]:
    """Returns all numbers of stages, or of many those that leave no rank over and others, evenly spaced in ratio."""
    if most <= _MOST_GRIDS:
        return list(range(1, most + 1))
    apart = spread(1, most, most ** (1 / _MOST_GRIDS))
    return sorted({*apart, *(count for count in range(1, most + 1) if num_ranks % count == 0)})


def even_counts(problem: Problem, num_replicas: int = 1) -> list[int]:
    """Returns the allowed M whose sizes are powers of two, equally many for each replica where that may be.

    One sample each is always among them: of equally many for each replica some may hold two, and need more memory.
    """
    low, high = micro_batch_range(problem)
    sizes = (2**k for k in range(problem.global_batch_size.bit_length() + 1))  # the last one is the whole batch
    shares = {math.ceil(problem.global_batch_size / (size * num_replicas)) for size in sizes}
    least, most = math.ceil(low / num_replicas), high // num_replicas
    if least > most:
        return [low]
    of_one = {high} if high == problem.global_batch_size else set()
    return sorted(of_one | {num_replicas * min(max(share, least), most) for share in shares})


def even_seconds(planner: Planner, grid: Grid) -> float:
    """Returns seconds that hardly any cuts of a grid take less than: those of even stages, with all memory."""
    sized = planner.sized(grid.num_micro_batches)
    work = float(sized.step_seconds.sum())
    part = max(work / grid.num_stages, float(sized.step_seconds.max()))
    share = share_of(grid.num_micro_batches, grid.num_replicas, 0)
    return (share * part + work - part) / max(planner.problem.cluster.speeds)


def _fewest_stages(planner: Planner, count: int) -> float:
    sized = planner.sized(count)
    state = sized.model.fixed(sized.held_by(0, planner.tables.num_segments))
    return state / max(planner.problem.cluster.memory_bytes)


def unequal_replicas(evaluator: Evaluator) -> Iterator[Trial]:
    """Yields splits with other replicas: for the numbers of micro-batches of the best grids, or for all."""
    planner, problem = evaluator.planner, evaluator.planner.problem
    known = evaluator.best_of_each(lambda each: each.num_micro_batches, NEAR_OF_A_FORMULA)[:2]
    cells = problem.cluster.num_ranks**3 * planner.tables.num_segments**2
    counts = list(dict.fromkeys([*(each.num_micro_batches for each in known), *micro_batch_counts(problem)]))
    for count in () if problem.constraints.num_replicas else counts[: max(len(known), _CELLS // cells)]:
        below = evaluator.least_seconds * NEAR_OF_A_FORMULA
        yield from ((candidate, below) for candidate in _unequal(planner, count, below))


def _unequal(planner: Planner, count: int, below: float) -> Iterator[Candidate]:
    """Yields the best split of each number of stages and ranks, by the formula, for M micro-batches.

    Of many ranks, replicas are multiples of a part of them. Splits that take `below` by the formula are left out.
    """
    problem, num_ranks = planner.problem, planner.problem.cluster.num_ranks
    forced, unit = forced_stages(problem), math.ceil(num_ranks / FEW_RANKS)
    choices = sorted({min(choice, count) for choice in range(unit, num_ranks + 1, unit)})
    most = min(stage_limit(problem, planner.tables.num_segments), num_ranks // choices[0])
    for order in rank_orders(problem) if most >= _fewest_stages(planner, count) else ():
        for seconds, starts, replicas in _best_splits(planner, count, order, choices, most):
            if seconds < below and forced in (0, len(starts)):
                for ranks in layouts(problem, order, replicas):
                    yield Candidate(starts, ranks, count)


def _best_splits(
    planner: Planner, count: int, order: Sequence[int], choices: Sequence[int], most: int
) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Returns seconds, starts and replicas of the best split for each number of stages and of ranks, by the formula.

    A dynamic program puts stages before others; the last one has the last ranks of the order.
    """
    formula, n, speeds = planner.formula(count), planner.tables.num_segments, planner.problem.cluster.speeds
    end = np.where(np.arange(n + 1) == n, 0.0, np.inf)
    best = {(0, 0): end}  # by ranks and stages, for each first segment
    steps: dict[tuple[int, int], tuple[Array, Array]] = {}  # of the first of these stages: its replicas, and its end
    for used, replicas in product(range(1, len(order) + 1), choices):
        rest = [stages for stages in range(most) if (used - replicas, stages) in best]
        if rest:
            first, behind = len(order) - used, len(order) - used + replicas
            ranks = sorted(order[first:behind], key=lambda rank: -speeds[rank])
            costs = formula.seconds(ranks, used, order[first - 1 : first], order[behind : behind + 1])
        for stages in rest:
            values, ends = put_before(costs, best[used - replicas, stages])
            row = best.setdefault((used, stages + 1), np.full(n + 1, np.inf))
            counts, stops = steps.setdefault((used, stages + 1), (np.zeros(n + 1), np.zeros(n + 1)))
            better = values < row
            row[better], counts[better], stops[better] = values[better], replicas, ends[better]
    found = []
    for (used, stages), row in best.items():
        if stages and np.isfinite(row[0]):
            starts, replicas_of = [0], list[int]()
            for left in range(stages, 0, -1):
                counts, stops = steps[used, left]
                replicas_of.append(int(counts[starts[-1]]))
                used -= replicas_of[-1]
                starts.append(int(stops[starts[-1]]))
            found.append((float(row[0]), tuple(starts[:-1]), tuple(replicas_of)))
    return sorted(found, key=lambda each: (each[0], sum(each[2])))
