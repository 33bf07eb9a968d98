"""Defines the schedule of Varuna."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.policy import Choice, Policy
from autovaruna.schedule.replica import Replica


class Varuna(Policy):
    """Runs what frees memory first: backward, then recompute, then forward; never waits.

        rank 0 | 0F0 0F1 0F2 0R0  .  0B0 0F3 0R1 0B1 0R2 0B2 0R3  .   .  0B3
        rank 1 |  .  1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1B2 1F3 1R3  .  1B3  .
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2  .   .   .  2F3 2B3  .   .

    Recompute of a stage overlaps with backward of the next: it is due once that has begun, and before that it fills
    time in which nothing else may run. The last stage goes backward right after each forward, so it never recomputes.
    When a gradient is late the rank runs ahead with forwards, as far as the plan's depth allows.

    References:
        Athlur et al., Varuna: Scalable, Low-cost Training of Massive Deep Learning Models, EuroSys 2022, section 3.2.
    """

    name = "varuna"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses backward, else a recompute that is due, else forward, else any recompute; deepest stage first."""
        for replica in replicas:
            if replica.can_backward:
                return replica, Kind.BACKWARD
        for replica in replicas:
            if replica.can_recompute and replica.gradient_is_due():
                return replica, Kind.RECOMPUTE
        for replica in replicas:
            if replica.can_forward:
                return replica, Kind.FORWARD
        for replica in replicas:
            if replica.can_recompute:
                return replica, Kind.RECOMPUTE
        return None

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether the stage recomputes; the last one does not."""
        return pipeline.recomputes(stage) and stage < pipeline.num_stages - 1
