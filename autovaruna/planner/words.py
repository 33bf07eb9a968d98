"""Says ranks in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_FEWEST_BY = 3


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks in short: ``0-3, 6``, and ``0-96 by 32`` for those that lie apart evenly."""
    steps = {other - rank for rank, other in pairwise(ranks)}
    if len(ranks) > _FEWEST_BY and len(steps) == 1 and min(steps) > 1:
        return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
