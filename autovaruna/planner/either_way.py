"""Plans with whole backwards, and with weight gradients computed apart where that can be better; takes the better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autovaruna.errors import PlanError
from autovaruna.planner.bound import StepBound
from autovaruna.planner.options import cut_positions, micro_batch_counts
from autovaruna.planner.problem import SPLIT_SCHEDULE, Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import Plan
from autovaruna.planner.sized import Sized

_WORTH = 0.97
"""A split backward must be predicted to take less than this share of the step: its parts are measured one by one."""


def plan_either_way(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Returns the best plan of a search, over schedules that split backward too.

    Args:
        problem: What to plan.
        search: Plans a problem with the schedules that its constraints name; `auto` is those with whole backwards.

    Raises:
        PlanError: No plan fits.
    """
    plan = search(problem)
    if not _may_split(problem):
        return plan
    other = replace(problem, constraints=replace(problem.constraints, schedule=SPLIT_SCHEDULE, max_stages_per_rank=1))
    bound = _split_bound(other, plan)
    split = _searched(other, search) if bound < _WORTH * plan.predicted_seconds else None
    bound = max(bound, split.bound_seconds) if split else bound
    best = split if split and split.predicted_seconds < _WORTH * plan.predicted_seconds else plan
    proof = f"{plan.bound_proof}; nor with weight gradients computed apart from backward, with one stage a rank"
    return replace(best, bound_seconds=min(plan.bound_seconds, bound), bound_proof=proof)


def _searched(problem: Problem, search: Callable[[Problem], Plan]) -> Plan | None:
    """Returns the best plan, or None: what is deferred may not fit into memory."""
    try:
        return search(problem)
    except PlanError:
        return None


def _may_split(problem: Problem) -> bool:
    constraints = problem.constraints
    has_weights = any(cost.weight_seconds > 0 for costs in problem.profile.costs for cost in costs)
    is_pipeline = problem.cluster.num_ranks > 1 and constraints.num_stages != 1 and len(problem.graph.blocks) > 1
    is_asked = constraints.schedule == "auto" and constraints.may_split and problem.needs_gradient
    return is_asked and has_weights and is_pipeline


def _split_bound(problem: Problem, plan: Plan) -> float:
    """Returns seconds that no plan with weight gradients computed apart beats; no more than `plan` takes."""
    tables, seconds = RangeTables(problem.graph, cut_positions(problem)), plan.predicted_seconds
    for count in sorted(micro_batch_counts(problem), key=lambda count: abs(count - plan.num_micro_batches)):
        seconds = min(seconds, StepBound(Sized(problem, tables, count, is_split=True)).seconds(seconds))
    return seconds
