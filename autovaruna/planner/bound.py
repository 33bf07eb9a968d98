"""Bounds the step of every plan from below: all work over all ranks, and the path of one micro-batch."""

from __future__ import annotations

import numpy as np

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.stage_memory import ROUNDING


def bound_of_all(sized: SizedProblem) -> float:
    """Returns seconds that no plan with so many micro-batches beats: all work, and the path of one micro-batch."""
    return max(_work(sized), _longest_path(sized)) * (1.0 - ROUNDING)


def _work(sized: SizedProblem) -> float:
    cluster, count = sized.problem.cluster, sized.num_micro_batches
    ranks = {rank for ranks in sized.problem.constraints.stage_ranks for rank in ranks} or range(cluster.num_ranks)
    speeds = [cluster.speeds[rank] for rank in ranks]
    each = float(sized.step_seconds.sum()) + sized.overhead_seconds * min(speeds)
    return (count * each + float(sized.optimizer_seconds_at((0, sized.tables.num_segments)))) / sum(speeds)


def _longest_path(sized: SizedProblem) -> float:
    """Returns what one micro-batch takes there and back, with its share of the others at the path's longest block."""
    problem, costs, backward = sized.problem, sized.costs, sized.backward_seconds
    flow = problem.gradient_flow if problem.needs_gradient else problem.flow
    path = flow.longest_path(sized.step_seconds)
    longest = max(float(np.maximum(costs.forward_seconds, backward)[path].max()), 0.0)
    share = -(-sized.num_micro_batches // problem.cluster.num_ranks)
    seconds = float(sized.step_seconds[path].sum()) + (share - 1) * longest
    return (seconds / max(problem.cluster.speeds)) + sized.overhead_seconds
