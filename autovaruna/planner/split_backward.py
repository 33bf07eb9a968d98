"""Plans with whole backwards, and with weight gradients computed apart where that can be better; takes the better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autovaruna.planner.bounds.proof import bound_of_all, step_bounds
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import SPLIT_SCHEDULE, Problem
from autovaruna.planner.ranges import TablesOfGraph
from autovaruna.planner.records import Plan
from autovaruna.planner.search_space import cut_positions, micro_batch_counts

_WORTH = 0.97
"""A split backward must be predicted to take less than this share of the step: its parts are measured one by one."""
_BEYOND = 1.0 + 2e-5
"""Where a bound is asked to go that is known to some 1e-5 of it, so that nothing is lost below."""


def plan_with_split_backward(
    problem: Problem,
    search: Callable[[Problem], Plan],
    search_below: Callable[[Problem, float], Plan | None],
    tables: TablesOfGraph,
) -> Plan:
    """Returns the best plan of a search, over schedules that split backward too.

    Args:
        problem: What to plan.
        search: Plans a problem with the schedules that its constraints name; `auto` is those with whole backwards.
        search_below: The same, but returns None if no plan takes less than so many seconds.
        tables: Of the problem's graph.

    Raises:
        PlanError: No plan fits.
    """
    plan = search(problem)
    if not _may_split(problem):
        return plan
    other = replace(problem, constraints=replace(problem.constraints, schedule=SPLIT_SCHEDULE, max_stages_per_rank=1))
    bounds = _Bounds(other, plan, tables)
    below = _WORTH * plan.predicted_seconds
    # Plans that are hardly better than that show the way to those that count.
    split = search_below(other, plan.predicted_seconds) if bounds.leave_room(below) else None
    split = split if split and split.predicted_seconds < below else None
    bound = split.bound_seconds if split else bounds.seconds(plan.bound_seconds)
    proof = f"{plan.bound_proof}; nor with weight gradients computed apart from backward, with one stage a rank"
    return replace(split or plan, bound_seconds=min(plan.bound_seconds, bound), bound_proof=proof)


class _Bounds:
    """The bounds over plans with weight gradients computed apart; the cheaper ones are asked first.

    Args:
        problem: Asks for such plans.
        plan: The best plan with whole backwards.
        tables: Of the problem's graph.
    """

    def __init__(self, problem: Problem, plan: Plan, tables: TablesOfGraph) -> None:
        self.problem, self.tables = problem, tables.at(cut_positions(problem))
        counts = sorted(micro_batch_counts(problem), key=lambda count: abs(count - plan.num_micro_batches))
        self.of_all = {count: bound_of_all(self._sized(count)) for count in counts}

    def leave_room(self, seconds: float) -> bool:
        """Returns whether a plan may take less than so many seconds."""
        open_counts = [count for count, of_all in self.of_all.items() if of_all < seconds]
        return any(bound.leaves_room(seconds) for bound in step_bounds(self._sized, open_counts))

    def seconds(self, upper: float) -> float:
        """Returns what no plan beats, `upper` at most."""
        open_counts = [count for count, of_all in self.of_all.items() if of_all < upper]
        for count, bound in zip(open_counts, step_bounds(self._sized, open_counts), strict=True):
            if self.of_all[count] < upper:
                upper = min(upper, max(bound.seconds(upper * _BEYOND), self.of_all[count]))
        return upper

    def _sized(self, num_micro_batches: int) -> SizedProblem:
        return SizedProblem(self.problem, self.tables, num_micro_batches, is_split=True)


def _may_split(problem: Problem) -> bool:
    constraints = problem.constraints
    has_weights = any(cost.weight_seconds > 0 for costs in problem.profile.costs for cost in costs)
    is_pipeline = problem.cluster.num_ranks > 1 and constraints.num_stages != 1 and len(problem.graph.blocks) > 1
    is_asked = constraints.schedule == "auto" and constraints.may_split and problem.needs_gradient
    return is_asked and has_weights and is_pipeline
