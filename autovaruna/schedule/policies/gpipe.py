"""Defines the schedule of GPipe."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.errors import ScheduleError
from autovaruna.schedule.instruction import BACKWARD, FORWARD, RECOMPUTE
from autovaruna.schedule.pipeline import Pipeline, deepest_in_flight
from autovaruna.schedule.policy import Choice, Policy
from autovaruna.schedule.replica import Replica


class GPipe(Policy):
    """Runs all forwards, then all backwards.

        rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
        rank 1 |  .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
        rank 2 |  .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .

    Backwards go in ascending order of micro-batches, unlike in the paper, so that gradients are summed in the order of
    one process. Simple, and the depth is the number of micro-batches. The one way to run a model that returns outputs
    instead of a loss.

    References:
        Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, NeurIPS 2019.
    """

    name = "gpipe"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses the deepest forward; backwards once the rank has no forward left."""
        for replica in replicas:
            if replica.can_forward:
                return replica, FORWARD
        if any(replica.forwards < replica.num_micro_batches for replica in replicas):
            return None
        for replica in replicas:
            if replica.can_backward:
                return replica, BACKWARD
        for replica in replicas:
            if replica.can_recompute:
                return replica, RECOMPUTE
        return None

    def depth(self, pipeline: Pipeline, stage: int, replica: int) -> int:
        """Returns the number of the replica's micro-batches."""
        allowed, needed = pipeline.stages[stage].in_flight, deepest_in_flight(pipeline, stage)
        if allowed < needed:
            raise ScheduleError(
                f"stage {stage}: gpipe holds {needed} micro-batches in flight, the plan allows {allowed}; "
                "use 1f1b or varuna, or plan with more memory"
            )
        return needed
