"""Splits a chain exactly: the greatest stage cost is the least possible.

The cost of a stage is any matrix ``[i, j]`` over its first segment and the first segment after it, infinite where the
stage is not allowed (too much memory), so bytes that cross, ties and limits need no special case. Dynamic programming
over (stages, first segment), from the last stage to the first, each stage one pass over the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.costs import Array

_ROWS = 32


@dataclass(frozen=True, slots=True)
class ChainPartition:
    """A split of n segments; stage s has the segments ``starts[s] .. starts[s + 1] - 1`` (the last one: to the end)."""

    starts: tuple[int, ...]
    objective: float


def partition_chain(stage_costs: Sequence[Array]) -> ChainPartition | None:
    """Returns the split into ``len(stage_costs)`` stages whose greatest cost is least, or None if there is none.

    Args:
        stage_costs: for each stage the matrix of its costs, ``(n + 1, n + 1)``, infinite for what is not allowed.
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
