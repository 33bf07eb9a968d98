"""Cuts a chain of segments into stages by formulas: the least greatest cost, even work, even work of groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.cost_table import Array

_ROWS = 32
"""Of a table of costs, which are read together."""
_HALVINGS = 20
"""After so many halvings the work of even stages is known to a millionth."""
_SHARE_OF_OWN = (0.25, 0.05)
"""What a stage's own seconds count beside those of its group, ever less: stages of very uneven sizes fill slowly."""
_WIDEST = 4.0
_FEW_STAGES = 8


@dataclass(frozen=True, slots=True)
class ChainPartition:
    """A split of n segments; stage s has the segments ``starts[s] .. starts[s + 1] - 1`` (the last one: to the end)."""

    starts: tuple[int, ...]
    objective: float


def partition_chain(stage_costs: Sequence[Array]) -> ChainPartition | None:
    """Returns the split into stages whose greatest cost is least, or None if there is none.

    Each stage has a matrix of its costs, ``(n + 1, n + 1)``, infinite for what is not allowed.
    """
    n = stage_costs[0].shape[0] - 1
    best = np.full(n + 1, np.inf)
    best[n] = 0.0
    choices = []
    for costs in reversed(stage_costs):
        best, choice = _put_before(costs, best)
        choices.append(choice)
    if not np.isfinite(best[0]):
        return None
    starts = [0]
    for choice in choices[:0:-1]:
        starts.append(int(choice[starts[-1]]))
    return ChainPartition(tuple(starts), float(best[0]))


def _put_before(costs: Array, best: Array) -> tuple[Array, NDArray[np.int64]]:
    """Puts one more stage before the best splits; returns the greatest cost for each start, and its end."""
    n = len(best) - 1
    values, ends = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
    # Few rows at a time stay in the processor's cache, and need only the columns after the first of them.
    for row in range(0, n, _ROWS):
        rows = min(_ROWS, n - row)
        totals = np.maximum(costs[row : row + rows, row + 1 :], best[row + 1 :])
        totals[np.tril_indices(rows, -1, n - row)] = np.inf
        choice = totals.argmin(axis=1)
        ends[row : row + rows] = choice + row + 1
        values[row : row + rows] = totals[np.arange(rows), choice]
    return values, ends


def even_starts(work: Array, num_stages: int) -> tuple[int, ...]:
    """Returns where stages start whose greatest work is least; `work` is that of all segments before each place."""
    low, high, best = work[-1] / num_stages, float(work[-1]), list(range(num_stages))
    for _ in range(_HALVINGS):
        middle, starts = (low + high) / 2, [0]
        for behind in range(num_stages - 1, 0, -1):
            end = int(work.searchsorted(work[starts[-1]] + middle, side="right")) - 1
            starts.append(min(max(end, starts[-1] + 1), len(work) - 1 - behind))
        if work[-1] - work[starts[-1]] <= middle and np.diff(work[starts]).max(initial=0.0) <= middle:
            high, best = middle, starts
        else:
            low = middle
    return tuple(best)


def cut_evenly(work: Array, loads: Sequence[float], pattern: Sequence[int]) -> Iterator[tuple[int, ...]]:
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


def _windows(pattern: Sequence[int]) -> list[tuple[int, int]]:
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
