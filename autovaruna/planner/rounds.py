"""Cuts a chain for ranks that hold several stages each: what every rank holds together is even, and so are its stages.

A *pattern* says for each stage which group of ranks holds it: in turn (0 1 2 0 1 2), so that a pipeline of K groups is
filled by stages that are v times shorter, or there and back (0 1 2 1 0), where the ends of the model share their ranks
and no message goes from the last group to the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from autovaruna.planner.costs import Array

Pattern = tuple[int, ...]

EVERY = 4
"""Up to so many rounds every number is worth a try, there and back too; of more, even numbers in turn are enough."""
_TURNS = 3
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

    Minimises the sum over stages of the squares of their own seconds, and then, again and again, of their seconds
    together with those of the other stages of the group as the cuts before left them.

    Args:
        work: seconds of each segment.
        loads: for each group, how often its busiest rank works for one micro-batch of each rank.
        pattern: the group of each stage; no more stages than segments.
    """
    total = np.append(0.0, np.cumsum(work))
    n, num_stages = len(work), len(pattern)
    width = n if num_stages <= _FEW_STAGES else min(n, math.ceil(_WIDEST * n / num_stages) + 1)
    factors = np.array([loads[group] for group in pattern])
    others = np.zeros(num_stages)
    known: set[tuple[int, ...]] = set()
    for _ in range(_TURNS):
        starts = _least_squares(total, factors, others, width)
        if starts is None or starts in known:
            return
        known.add(starts)
        yield starts
        own = factors * np.diff(total[[*starts, n]])
        held = np.zeros(len(loads))
        np.add.at(held, list(pattern), own)
        others = held[list(pattern)] - own


def _least_squares(total: Array, factors: Array, others: Array, width: int) -> tuple[int, ...] | None:
    """Returns the first segments of the stages for which the sum of ``(own + others)^2 + own^2 / 4`` is least."""
    n, num_stages = len(total) - 1, len(factors)
    rows = np.arange(n + 1)
    ends = np.minimum(rows[:, None] + 1 + np.arange(width)[None, :], n)
    own = np.where(rows[:, None] < ends, total[ends] - total[:, None], np.inf)
    seconds = {factor: factor * own for factor in {*factors.tolist()}}
    quarters = {factor: each**2 / 4 for factor, each in seconds.items()}
    padded = np.full(n + width + 1, np.inf)  # the best rest behind each end; rows past the end see infinities
    best, later = padded[: n + 1], np.lib.stride_tricks.sliding_window_view(padded[1:], width)[: n + 1]
    best[n] = 0.0
    choices, costs = [], np.empty_like(own)
    for stage in range(num_stages - 1, -1, -1):
        factor = float(factors[stage])
        np.add(seconds[factor], others[stage], out=costs)
        np.square(costs, out=costs)
        costs += quarters[factor]
        costs += later
        columns = costs.argmin(axis=1)
        best[:] = costs[rows, columns]
        best[n] = np.inf
        choices.append(ends[rows, columns])
    if not np.isfinite(best[0]):
        return None
    starts = [0]
    for choice in choices[:0:-1]:
        starts.append(int(choice[starts[-1]]))
    return tuple(starts)
