"""Says which of two plans is simpler, and what is given up for the simpler one."""

from __future__ import annotations

from typing import NamedTuple

from autovaruna.planner.records import Plan


class Simplicity(NamedTuple):
    """What makes a plan harder to read, to debug and to resume; of two plans the lesser is simpler."""

    num_stages: int
    has_unequal_replicas: bool
    has_several_a_rank: bool
    has_other_schedule: bool
    num_micro_batches: int
    seconds: float

    @classmethod
    def of(cls, plan: Plan) -> Simplicity:
        """Returns that of a plan."""
        has_unequal = len({len(stage.ranks) for stage in plan.stages}) > 1
        is_other = plan.schedule != "1f1b" and plan.num_stages > 1
        seconds = plan.predicted_seconds
        return cls(plan.num_stages, has_unequal, plan.is_shared, is_other, plan.num_micro_batches, seconds)


def what_was_given_up(plan: Plan, fastest: Plan) -> str:
    """Returns what a faster plan that was not chosen has, in words; empty: there is none."""
    if plan.predicted_seconds <= fastest.predicted_seconds:
        return ""
    mine, other = Simplicity.of(plan), Simplicity.of(fastest)
    words = {
        "num_stages": f"{fastest.num_stages} stages",
        "has_unequal_replicas": "unequal replicas",
        "has_several_a_rank": "several stages a rank",
        "has_other_schedule": f"the schedule {fastest.schedule}",
        "num_micro_batches": f"{fastest.num_micro_batches} micro-batches",
        "seconds": "other cuts",
    }
    kind = next(name for name in Simplicity._fields if getattr(mine, name) != getattr(other, name))
    return f"a plan with {words[kind]} is predicted {1 - fastest.predicted_seconds / plan.predicted_seconds:.1%} faster"
