"""Plans with the user's cut points: only there, there if that is about as good, or as if there were none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan

PREFER_MARGIN = 0.05
"""By which share of its step a plan that cuts elsewhere must be better than one that cuts at cut points."""

_log = logging.getLogger(__name__)


def plan_with_marks(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Returns the best plan that heeds the cut points as the user asked.

    Args:
        problem: What to plan; forced cuts need no cut points.
        search: Finds the best plan of a problem.

    Raises:
        PlanError: there is none.
    """
    choice = problem.constraints.cutpoints
    if choice == "ignore" or problem.constraints.cuts or (choice == "prefer" and not problem.graph.cut_marks):
        return search(problem)
    _warn(problem.graph)
    free, marked = (
        replace(problem, constraints=replace(problem.constraints, cutpoints=each)) for each in ("ignore", "only")
    )
    if choice == "only":
        return _search_marked(marked, search)
    try:
        plan = _search_marked(marked, search)
    except PlanError as error:
        _log.info("no plan cuts at cut points alone (%s); cutting anywhere", error)
        return search(free)
    other = search(free)
    if other.predicted_seconds < plan.predicted_seconds * (1.0 - PREFER_MARGIN):
        _log.info(
            "cutting beside the cut points: a step takes %.6g s, at the cut points %.6g s",
            other.predicted_seconds,
            plan.predicted_seconds,
        )
        return other
    return replace(
        plan,
        bound_seconds=min(plan.bound_seconds, other.bound_seconds),
        single_bound_seconds=other.single_bound_seconds,
        bound_proof=other.bound_proof,
    )


def _search_marked(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    constraints = problem.constraints
    complaint = too_few_marks(problem.graph, constraints.num_stages or len(constraints.stage_ranks))
    if complaint:
        raise PlanError(complaint)
    return search(problem)


def marked_blocks(graph: Graph) -> list[int]:
    """Returns the blocks at which a cut point lets a stage start, ascending."""
    return sorted({mark.block for mark in graph.cut_marks if mark.block > 0})


def too_few_marks(graph: Graph, num_stages: int) -> str:
    """Returns why cuts at cut points alone cannot make so many stages; empty if they can."""
    most = len(marked_blocks(graph)) + 1
    if num_stages <= most:
        return ""
    useless = "".join(f"; {mark.name} is none: {mark.reason}" for mark in graph.cut_marks if mark.block <= 0)
    return (
        f"{num_stages} stages are asked for, but cutpoints='only' allows {most}: the model has {most - 1} places with "
        f"a usable CutPoint{useless}. Put CutPoints between the stages that you want, ask for {most} stages or fewer, "
        "or pass cutpoints='prefer'"
    )


def _warn(graph: Graph) -> None:
    for mark in graph.cut_marks:
        if mark.block <= 0:
            _log.warning("the CutPoint %s cannot be a cut: %s", mark.name, mark.reason)
