"""Cuts the model for the ranks of its stages: evenly, or so that the greatest cost of a stage is least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.arrays import Array
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.search_space import Ranks

_ROWS = 32
"""Of a table of costs, which are read together."""
_HALVINGS = 20
"""After so many halvings the work of even stages is known to a millionth."""


def cut_for_ranks(planner: Planner, count: int, stage_ranks: Ranks) -> Candidate | None:
    """Returns the best cuts for some ranks by the formula, or, if none fits by it, those of the least work."""
    formula, costs = planner.formula(count), list[Array]()
    for stage, ranks in enumerate(stage_ranks):
        num_held = max(sum(rank in others for others in stage_ranks) for rank in ranks)
        num_behind = sum(map(len, stage_ranks[stage:]))
        before = stage_ranks[stage - 1][-1:] if stage else ()
        behind = stage_ranks[stage + 1][:1] if stage + 1 < len(stage_ranks) else ()
        costs.append(formula.seconds(ranks, num_behind, before, behind, num_held))
    starts = partition_chain(costs) or partition_chain([planner.sized(count).work] * len(costs))
    return Candidate(starts, stage_ranks, count) if starts else None


def partition_chain(stage_costs: Sequence[Array]) -> tuple[int, ...] | None:
    """Returns the first segment of each stage in the split whose greatest cost is least, or None if there is none.

    Each stage has a matrix of its costs, ``(n + 1, n + 1)``, infinite for what is not allowed.
    """
    n = stage_costs[0].shape[0] - 1
    best = np.full(n + 1, np.inf)
    best[n] = 0.0
    choices = []
    for costs in reversed(stage_costs):
        best, choice = put_before(costs, best)
        choices.append(choice)
    if not np.isfinite(best[0]):
        return None
    starts = [0]
    for choice in choices[:0:-1]:
        starts.append(int(choice[starts[-1]]))
    return tuple(starts)


def put_before(costs: Array, best: Array) -> tuple[Array, NDArray[np.int64]]:
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
