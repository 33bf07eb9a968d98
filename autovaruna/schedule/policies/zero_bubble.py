"""Defines the schedule that splits backward."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.instruction import WEIGHT
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.policies.one_f_one_b import OneFOneB
from autovaruna.schedule.policy import Choice
from autovaruna.schedule.replica import Replica


class ZeroBubble(OneFOneB):
    """Runs as 1F1B, but computes gradients of weights apart from backward, when there is nothing else to do.

        rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0W0 0B1 0W1 0B2 0W2 0B3 0W3
        rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1W0 1B2 1W1 1B3 1W2 1W3
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2W0 2B3 2W1 2W2 2W3

    The stage before waits for the gradients of activations alone, so backwards follow each other sooner, and weight
    gradients (W) fill what was bubble. Whatever is deferred holds memory; a stage that has deferred as many as the plan
    allows computes the oldest before its next backward. With as many as 1F1B has in flight less, that is one more on
    each later stage, the memory of the first stage is that of all (ZB-H1 in the paper); more hides slow links.

    The paper finds the order by search, and goes on to the next step before the optimizer's checks are done. Here the
    order is greedy, which in equal stages without latency reaches the lower bound of a step, and steps stay apart.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
    """

    name = "zero_bubble"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses weight gradients that a backward waits for, else what 1F1B does, else any weight gradients."""
        for replica in replicas:
            if replica.is_blocked and replica.has_gradient:
                return replica, WEIGHT
        choice = super().pick(replicas)
        if choice is not None:
            return choice
        for replica in replicas:
            if replica.can_weight:
                return replica, WEIGHT
        return None

    def splits(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether the plan lets the stage defer weight gradients."""
        return pipeline.needs_gradients and pipeline.stages[stage].deferred > 0
