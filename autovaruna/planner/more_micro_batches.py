"""Plans with more micro-batches than are searched by default, where nothing else fits into memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from autovaruna.errors import PlanError
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan

_TIMES_MORE = 4

_log = logging.getLogger(__name__)


def plan_with_more(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Returns the best plan; if none fits and the limit of micro-batches is not the user's, one beyond the limit.

    Args:
        problem: What to plan.
        search: Finds the best plan of a problem.

    Raises:
        PlanError: none fits with any number of micro-batches that the batch and the settings allow.
    """
    while True:
        try:
            return search(problem)
        except PlanError as error:
            wider = _wider(problem) if error.lacks_memory else None
            if wider is None:
                raise
        problem = wider
        _log.info("no plan fits into memory; trying up to %d micro-batches", problem.constraints.max_micro_batches)


def _wider(problem: Problem) -> Problem | None:
    """Returns the problem with a higher limit of micro-batches; None if it may not, or need not, be raised."""
    constraints, batch = problem.constraints, problem.global_batch_size
    most = constraints.max_micro_batches
    is_forced = constraints.num_micro_batches or constraints.micro_batch_size
    if not constraints.may_exceed_max or is_forced or not 0 < most < batch:
        return None
    return replace(problem, constraints=replace(constraints, max_micro_batches=min(_TIMES_MORE * most, batch)))
