"""Finds the blocks that names of cuts mean, and plans with the user's cut points: only there, or there if as good."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan

_log = logging.getLogger(__name__)

PREFER_MARGIN = 0.05
"""By which share of its step a plan that cuts elsewhere must be better than one that cuts at cut points."""


def resolve_cut(graph: Graph, name: str) -> int:
    """Returns the index of the block at which a cut starts a new stage; the name may be that of a cut point.

    Raises:
        PlanError: if no block and no module has that name; names the nearest.
    """
    of_blocks = [block.index for block in graph.blocks if block.name == name]
    of_marks = [mark.block for mark in graph.cut_marks if mark.name == name and mark.block > 0]
    of_modules = [block.index for block in graph.blocks if f"{block.module}.".startswith(f"{name}.")]
    if found := [*of_blocks, *of_marks, *of_modules]:
        return found[0]
    paths = [accumulate(block.module.split("."), "{}.{}".format) for block in graph.blocks if block.module]
    modules = {module for path in paths for module in path}
    names = [block.name for block in graph.blocks]
    nearest = get_close_matches(name, [*sorted(modules), *names], n=3, cutoff=0.4)
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else f"; the blocks start with {', '.join(names[:5])}"
    raise PlanError(f"cut {name!r} names no block and no module of this model{hint}")


def resolve_cuts(graph: Graph, names: Sequence[str]) -> tuple[int, ...]:
    """Returns the first block of each stage but the first.

    Raises:
        PlanError: if a name is unknown, or the cuts are not in execution order, or one leaves a stage empty.
    """
    starts = tuple(resolve_cut(graph, name) for name in names)
    before, before_name = 0, "the start of the model"
    for start, name in zip(starts, names, strict=True):
        if start <= before:
            raise PlanError(
                f"cut {name!r} (block {start}) does not lie after {before_name!r} (block {before}): the stage between "
                f"them would be empty; give the cuts in execution order"
            )
        before, before_name = start, name
    return starts


def stage_blocks(starts: Sequence[int], num_blocks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the blocks of each stage, given the first block of each (the first one is 0)."""
    ends = [*starts[1:], num_blocks]
    return tuple(tuple(range(i, j)) for i, j in zip(starts, ends, strict=True))


def plan_with_cut_points(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Returns the best plan that heeds the cut points as the user asked; raises PlanError if there is none."""
    choice = problem.constraints.cutpoints
    if choice == "ignore" or problem.constraints.cuts or (choice == "prefer" and not problem.graph.cut_marks):
        return search(problem)
    for mark in problem.graph.cut_marks:
        if mark.block <= 0:
            _log.warning("the CutPoint %s cannot be a cut: %s", mark.name, mark.reason)
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
        seconds = other.predicted_seconds, plan.predicted_seconds
        _log.info("cutting beside the cut points: a step takes %.6g s, at the cut points %.6g s", *seconds)
        return other
    return replace(plan, bound_seconds=min(plan.bound_seconds, other.bound_seconds))


def _search_marked(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Returns the plan that cuts at cut points alone; raises PlanError if there are too few of them."""
    graph, constraints = problem.graph, problem.constraints
    num_stages, most = constraints.num_stages or len(constraints.stage_ranks), len(cut_point_blocks(graph)) + 1
    if num_stages <= most:
        return search(problem)
    useless = "".join(f"; {mark.name} is none: {mark.reason}" for mark in graph.cut_marks if mark.block <= 0)
    raise PlanError(
        f"{num_stages} stages are asked for, but cutpoints='only' allows {most}: the model has {most - 1} places with "
        f"a usable CutPoint{useless}. Put CutPoints between the stages that you want, ask for {most} stages or fewer, "
        "or pass cutpoints='prefer'"
    )


def cut_point_blocks(graph: Graph) -> list[int]:
    """Returns the blocks at which a cut point lets a stage start, ascending."""
    return sorted({mark.block for mark in graph.cut_marks if mark.block > 0})
