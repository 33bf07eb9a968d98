"""Places the gradient all-reduces of a step.

The all-reduce of a stage starts when its last backward, or what is split off it, has ended on all its replicas. It
needs no rank's attention, so it overlaps with other stages' work; those that share a rank go one after another.
"""

from __future__ import annotations

from autovaruna.schedule.instruction import BACKWARD, WEIGHT
from autovaruna.schedule.messages import exact
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.simulation import Act, Reduction


def reductions(pipeline: Pipeline, acts: tuple[list[Act], ...]) -> tuple[Reduction, ...]:
    """Returns the all-reduces that take time, in the order in which they start."""
    last = _ends_of_gradients(pipeline, acts)
    free = [0.0] * pipeline.num_ranks
    placed = []
    for stage in sorted(range(pipeline.num_stages), key=lambda s: (last[s], -s)):
        ranks, seconds = pipeline.stages[stage].ranks, exact(pipeline.stages[stage].reduce_seconds)
        if seconds > 0 and pipeline.needs_gradients:
            start = max(last[stage], max(free[rank] for rank in ranks))
            placed.append(Reduction(stage, ranks, start, start + seconds))
            for rank in ranks:
                free[rank] = start + seconds
    return tuple(placed)


def _ends_of_gradients(pipeline: Pipeline, acts: tuple[list[Act], ...]) -> list[float]:
    """Returns when each stage has all its gradients, on all its replicas."""
    last = [0.0] * pipeline.num_stages
    for row in acts:
        for _, end, replica, kind, _ in row:
            if end > last[replica.stage] and (kind is BACKWARD or kind is WEIGHT):
                last[replica.stage] = end
    return last
