"""Splits a chain exactly: the greatest stage cost is the least possible.

The cost of a stage is any matrix ``[i, j]`` over its first segment and the first segment after it, infinite where the
stage is not allowed (too much memory), so bytes that cross, ties and limits need no special case. Dynamic programming
over (stages, first segment), from the last stage to the first, each stage one pass over the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.costs import Array


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
        totals = np.maximum(costs, best[None, :])
        totals[np.tril_indices(n + 1)] = np.inf
        choices.append(totals.argmin(axis=1))
        best = totals[np.arange(n + 1), choices[-1]]
    if not np.isfinite(best[0]):
        return None
    starts = [0]
    for choice in choices[:0:-1]:
        starts.append(int(choice[starts[-1]]))
    return ChainPartition(tuple(starts), float(best[0]))
