"""Lists choices: for every sensible (stages, replicas, micro-batch size) the best plan, fastest first.

A choice is an even grid: all stages have the same number of replicas, as many as the ranks allow. The sizes of
micro-batches are powers of two, unless they are given.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from autovaruna.errors import PlanError
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan

_log = logging.getLogger(__name__)

_MOST_GRIDS = 24


@dataclass(frozen=True)
class Choice:
    """One way to use the ranks, with the best plan of its kind."""

    num_stages: int
    num_replicas: int
    micro_batch_size: int
    plan: Plan
    samples_per_second: float
    memory_bytes: float

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.plan.predicted_seconds


def plan_choices(
    problem: Problem,
    micro_batch_sizes: Sequence[int] = (),
    *,
    budget_seconds: float = 30.0,
    progress: Callable[[str, float], None] | None = None,
) -> list[Choice]:
    """Returns the choices that fit into memory, fastest first.

    Args:
        problem: What to plan; forced numbers of stages, replicas and micro-batches stay forced.
        micro_batch_sizes: The sizes to try; empty: powers of two up to the largest that the batch allows.
        budget_seconds: After this time no further choice is planned; those that promise most come first.
        progress: Is told how far the search is.

    Raises:
        PlanError: no choice fits; says what is missing.
    """
    ends = perf_counter() + budget_seconds
    found: list[Choice] = []
    grids = [(s, r, size) for s, r in _grids(problem) for size in micro_batch_sizes or _sizes(problem)]
    for done, (num_stages, num_replicas, size) in enumerate(grids):
        if found and perf_counter() > ends:
            _log.warning("%d of %d choices were planned: time was up, better ones may be left", done, len(grids))
            break
        if progress is not None:
            progress("planning choices", done / len(grids))
        choice = _choice(problem, num_stages, num_replicas, size)
        found += [choice] if choice else []
    if not found:
        make_plan(problem)  # says what is missing
        raise PlanError("no even grid of stages and replicas fits; unequal replicas do: plan without a table")
    return sorted(found, key=lambda choice: (choice.step_seconds, choice.num_stages))


def _choice(problem: Problem, num_stages: int, num_replicas: int, size: int) -> Choice | None:
    count = max(math.ceil(problem.global_batch_size / size), problem.min_micro_batches_for_inputs)
    constraints = replace(
        problem.constraints,
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_micro_batches=min(count, problem.global_batch_size),
        micro_batch_size=0,
    )
    try:
        plan = make_plan(replace(problem, constraints=constraints))
    except PlanError:
        return None
    rate = problem.global_batch_size / plan.predicted_seconds if plan.predicted_seconds > 0 else math.inf
    memory = max(plan.rank_bytes())
    return Choice(num_stages, num_replicas, size, plan, rate, memory)


def _grids(problem: Problem) -> list[tuple[int, int]]:
    """Returns (stages, replicas), as many replicas as the ranks allow, those that use most ranks first."""
    num_ranks, constraints = problem.cluster.num_ranks, problem.constraints
    most = min(num_ranks, len(problem.graph.blocks))
    forced = constraints.num_stages or (len(constraints.cuts) + 1 if constraints.cuts else 0)
    stages = [forced] if forced else _spread(most, num_ranks)
    pairs = [(s, constraints.num_replicas or num_ranks // s) for s in stages]
    possible = [(s, r) for s, r in pairs if r and s * r <= num_ranks]
    return sorted(possible, key=lambda pair: (-pair[0] * pair[1], pair[0]))


def _spread(most: int, num_ranks: int) -> list[int]:
    """Returns all numbers of stages, or of many those that leave no rank over and others, evenly spaced in ratio."""
    if most <= _MOST_GRIDS:
        return list(range(1, most + 1))
    spread = {round(most ** (k / (_MOST_GRIDS - 1))) for k in range(_MOST_GRIDS)}
    return sorted(spread | {count for count in range(1, most + 1) if num_ranks % count == 0})


def _sizes(problem: Problem) -> list[int]:
    constraints = problem.constraints
    if constraints.num_micro_batches:
        return [math.ceil(problem.global_batch_size / constraints.num_micro_batches)]
    if constraints.micro_batch_size:
        return [constraints.micro_batch_size]
    largest = max(1, problem.global_batch_size // problem.min_micro_batches_for_inputs)
    return [2**k for k in range(largest.bit_length())]
