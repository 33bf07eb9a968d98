"""Defines the schedule of Varuna."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.instruction import BACKWARD, FORWARD, RECOMPUTE
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.policy import Choice, Policy
from autovaruna.schedule.replica import Replica


class Varuna(Policy):
    """Runs what frees memory first: backward, then recompute, then forward; never waits.

        rank 0 | 0F0 0F1 0F2 0R0  .  0B0 0F3 0R1 0B1 0R2 0B2 0R3  .   .  0B3
        rank 1 |  .  1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1B2 1F3 1R3  .  1B3  .
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2  .   .   .  2F3 2B3  .   .

    A recompute goes before forwards once its gradient is here. Before that it fills the time in which neither forward
    nor backward may run, and so overlaps with the backward of the next stage. The last stage goes backward right after
    each forward, so it never recomputes. While a gradient is late the rank runs ahead with forwards, as far as the
    depth allows; while an activation is late it recomputes and goes backward.

    The paper starts a recompute, before any forward, as soon as the next stage has begun its backward. In simulations
    of uneven chains of 2 to 8 stages that was slower everywhere, by 1 to 6 %: it holds up the forwards that the next
    stages wait for. For the same reason `1f1b` with the same depth, where forwards come before recomputes, is often
    faster than this order by a few percent.

    References:
        Athlur et al., Varuna: Scalable, Low-cost Training of Massive Deep Learning Models, EuroSys 2022, section 3.2.
    """

    name = "varuna"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses backward, else a recompute whose gradient is here, else forward, else any recompute."""
        for replica in replicas:
            if replica.can_backward:
                return replica, BACKWARD
        for replica in replicas:
            if replica.can_recompute and replica.has_gradient:
                return replica, RECOMPUTE
        for replica in replicas:
            if replica.can_forward:
                return replica, FORWARD
        for replica in replicas:
            if replica.can_recompute:
                return replica, RECOMPUTE
        return None

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether the stage recomputes; the last one does not."""
        return pipeline.recomputes(stage) and not pipeline.is_last(stage)
