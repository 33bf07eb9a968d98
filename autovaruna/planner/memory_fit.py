"""Fits plans by what the instructions of their ranks need.

The search fits plans by their in-flight depths, which is no less than they need: stages of one rank do not reach their
depths together, nor what they defer. What instructions need is known once a plan was simulated. So a plan that saves
memory is built again with limits that are higher by the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import Evaluator
from autovaruna.planner.memory.rank_memory import Option
from autovaruna.planner.records import Plan, StagePlan

Found = tuple[Planner, Candidate, Plan]
"""A plan with its candidate, and the planner that built it."""

Predict = Callable[[Plan], Plan]
"""Tells the seconds of a plan and the memory of its ranks."""

_TURNS = 3
"""The difference depends on the plan, which is built with it, so it takes a few turns."""


def that_fits(planner: Planner, candidate: Candidate, plan: Plan) -> Plan | None:
    """Returns the plan with the memory of its ranks, or one built again that fits; None if there is none."""
    whole = planner.predict_whole(plan)
    return whole if is_within(planner, whole) else _built_again(planner, candidate, whole)


def with_all_memory_used(planner: Planner, candidate: Candidate, plan: Plan, predict: Predict | None = None) -> Plan:
    """Returns the plan, or a faster one that saves less memory, if its ranks hold several stages and may do so.

    Args:
        planner: that built it.
        candidate: that it was built from.
        plan: with the memory of its ranks; it fits.
        predict: what has told its seconds and memory; of all ranks if there is none.
    """
    if not candidate.is_interleaved or not _is_squeezed(planner, candidate, plan):
        return plan
    return min((_built_again(planner, candidate, plan, predict) or plan, plan), key=lambda each: each.predicted_seconds)


def use_all_memory_of_best(trials: Evaluator, most: int) -> None:
    """Builds the best plans of some trials again where that makes them faster."""
    for candidate in trials.best_few(most):
        variant, plan = trials.built[candidate]
        if _is_squeezed(trials.planner, variant, plan):
            predict = trials.planner.predict_part
            trials.put(candidate, variant, with_all_memory_used(trials.planner, variant, predict(plan), predict))


def _built_again(planner: Planner, candidate: Candidate, plan: Plan, predict: Predict | None = None) -> Plan | None:
    """Returns the fastest plan of a candidate that fits by what instructions need; None if none of a few does."""
    best = None
    for _ in range(_TURNS):
        other = planner.build(candidate, _limits(planner, plan))
        if other is None or choices_of(other.stages) == choices_of(plan.stages):
            break
        plan = (predict or planner.predict_whole)(other)
        if is_within(planner, plan) and (best is None or plan.predicted_seconds < best.predicted_seconds):
            best = plan
    return best


def _limits(planner: Planner, plan: Plan) -> tuple[float, ...]:
    """Returns the limits of ranks, less what their instructions need beyond what their depths do."""
    by_depths, needed = replace(plan, rank_memory_bytes=()).rank_bytes(), plan.rank_bytes()
    rows = zip(planner.limits, by_depths, needed, strict=True)
    return tuple(limit + bounded - most for limit, bounded, most in rows)


def _is_squeezed(planner: Planner, candidate: Candidate, plan: Plan) -> bool:
    """Returns whether memory has changed a plan."""
    free = planner.build(candidate, (float("inf"),) * plan.num_ranks)
    return free is not None and choices_of(free.stages) != choices_of(plan.stages)


def choices_of(stages: Iterable[StagePlan | Option]) -> tuple[tuple[bool, int, int], ...]:
    """Returns what memory leaves each stage to choose."""
    return tuple([(stage.needs_recompute, stage.in_flight, stage.deferred) for stage in stages])


def is_within(planner: Planner, plan: Plan) -> bool:
    """Returns whether a plan with the memory of its ranks fits."""
    return all(needed <= limit for needed, limit in zip(plan.rank_bytes(), planner.limits, strict=True))
