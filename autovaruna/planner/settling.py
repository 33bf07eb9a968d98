"""Fits a plan with what the instructions of its ranks need, instruction by instruction.

While it searches, the planner bounds the memory of a rank by the depths of its stages, which do not reach them
together, and by a share for holes of the heap. What the instructions need is known for a plan that was simulated. Where
that is more than the limit, the plan is built again with a limit that is lower by as much; where it is less, and memory
has made stages recompute or hold fewer micro-batches, with one that is higher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice

from autovaruna.errors import PlanError
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.infeasible import readable, to_give
from autovaruna.planner.memory.fitting import Option
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.planner.trials import Trials

Found = tuple[Planner, Candidate, Plan]
"""A plan with its candidate, and the planner that built it."""

Predict = Callable[[Plan], Plan]
"""Tells the seconds of a plan and the memory of its ranks."""

_TURNS = 3
"""What is more or less than was bounded depends on the plan, which is built with it, so it takes a few turns."""
_MOST_PLANS = 8


def first_that_fits(found: Iterable[Found]) -> Plan | None:
    """Returns the first plan that fits as it is, or one built again that is faster; None if none of some fits.

    Args:
        found: plans, the fastest first.
    """
    best: Plan | None = None
    for planner, candidate, plan in islice(found, _MOST_PLANS):
        if best and plan.predicted_seconds >= best.predicted_seconds:
            break
        whole = planner.predict_whole(plan)
        if is_within(planner, whole):
            return _faster(best, loosened(planner, candidate, whole))
        best = _faster(best, _built_again(planner, candidate, whole))
    return best


def that_fits(planner: Planner, candidate: Candidate, plan: Plan) -> Plan | None:
    """Returns the plan with the memory of its ranks, or one built again that fits; None if there is none."""
    whole = planner.predict_whole(plan)
    return whole if is_within(planner, whole) else _built_again(planner, candidate, whole)


def loosened(planner: Planner, candidate: Candidate, plan: Plan, predict: Predict | None = None) -> Plan:
    """Returns the plan, or a faster one that saves less memory, if its ranks hold several stages and may do so.

    Args:
        planner: that built it.
        candidate: that it was built from.
        plan: with the memory of its ranks; it fits.
        predict: what has told its seconds and memory; of all ranks if there is none.
    """
    if not candidate.is_interleaved or not _is_squeezed(planner, candidate, plan):
        return plan
    return _faster(plan, _built_again(planner, candidate, plan, predict)) or plan


def loosen_best(trials: Trials, most: int) -> None:
    """Builds the best plans of some trials again where that makes them faster."""
    for candidate in trials.best_few(most):
        variant, plan = trials.built[candidate]
        if _is_squeezed(trials.planner, variant, plan):
            predict = trials.planner.predict_part
            known = predict(plan)
            if is_within(trials.planner, known):
                trials.put(candidate, variant, loosened(trials.planner, variant, known, predict))


def explain_excess(planner: Planner, plan: Plan) -> PlanError:
    """Returns what a user needs to know where plans fit by their depths, but not by their instructions.

    Args:
        planner: of the problem.
        plan: the fastest one.
    """
    limits, needed = planner.limits, planner.predict_whole(plan).rank_bytes()
    rank = max(range(len(limits)), key=lambda each: needed[each] - limits[each])
    short = {each: needed[each] for each in range(len(limits)) if each == rank or needed[each] > limits[each]}
    error = PlanError(
        f"no plan fits into memory: the instructions of the best one, with {plan.num_stages} stages and "
        f"{plan.num_micro_batches} micro-batches, need {readable(needed[rank])} on rank {rank}, which has "
        f"{readable(limits[rank])}. To make it fit: {to_give(planner.problem.cluster, short)}; or use more "
        "ranks; or allow more, smaller micro-batches (num_micro_batches, max_micro_batches)"
    )
    error.lacks_memory = True
    return error


def _built_again(planner: Planner, candidate: Candidate, plan: Plan, predict: Predict | None = None) -> Plan | None:
    """Returns the fastest plan of a candidate that fits by what instructions need; None if none of a few does."""
    best = None
    for _ in range(_TURNS):
        other = planner.build(candidate, _limits(planner, plan))
        if other is None or choices_of(other.stages) == choices_of(plan.stages):
            break
        plan = (predict or planner.predict_whole)(other)
        best = _faster(best, plan) if is_within(planner, plan) else best
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
    return not excess_bytes(planner, plan)


def excess_bytes(planner: Planner, plan: Plan) -> float:
    """Returns what the ranks of a plan need beyond their limits, together."""
    limits = planner.limits
    return sum(max(needed - limit, 0.0) for needed, limit in zip(plan.rank_bytes(), limits, strict=True))


def _faster(one: Plan | None, other: Plan | None) -> Plan | None:
    both = [plan for plan in (one, other) if plan]
    return min(both, key=lambda plan: plan.predicted_seconds, default=None)
