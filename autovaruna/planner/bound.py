"""Bounds the step of every plan from below: all work over all ranks, a micro-batch's path, the stages of a chain."""

from __future__ import annotations

import math

import numpy as np

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import forced_stages
from autovaruna.planner.search_space import stages_per_rank
from autovaruna.planner.stage_memory import ROUNDING


def bound_of_all(sized: SizedProblem) -> float:
    """Returns seconds that no plan with so many micro-batches beats: the greatest of three bounds."""
    return max(_work(sized), _longest_path(sized), _chain_of_stages(sized)) * (1.0 - ROUNDING)


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


def _chain_of_stages(sized: SizedProblem) -> float:
    """Returns what so many stages take as the user asks for, one a rank, if the model is a chain; else 0.

        T >= a micro-batch's work W(s) before stage s, there and back  +  micro-batches of a rank * work of stage s

    So T - W(s) falls by a factor of 1 - replicas / micro-batches at each stage at most, and is T - W behind the last.
    """
    problem, speed = sized.problem, max(sized.problem.cluster.speeds)
    num_stages, replicas = forced_stages(problem), problem.constraints.num_replicas
    waits = sized.waits[0] + sized.waits[1]
    is_chain = np.allclose(waits[1:-1], np.cumsum(sized.step_seconds)[:-1] / speed)
    if num_stages < 2 or stages_per_rank(problem) > 1 or problem.constraints.stage_ranks or not is_chain:
        return 0.0
    most = replicas or problem.cluster.num_ranks - num_stages + 1  # unequal replicas leave least where they differ most
    counts = [*[replicas or 1] * (num_stages - 1), most]
    left = math.prod(1 - min(count / sized.num_micro_batches, 1.0) for count in counts)
    return float(sized.step_seconds.sum()) / speed / (1 - left)
