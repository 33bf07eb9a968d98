"""Defines the policy that follows a given schedule."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.grid import grid
from autovaruna.schedule.instruction import Kind, Schedule
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.policy import Choice, Policy
from autovaruna.schedule.replica import Replica


class FixedOrder(Policy):
    """Runs each rank's instructions in the order of a schedule, waiting for each."""

    name = "fixed"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.positions = [0] * len(schedule)
        self.recomputing = {act.stage for row in schedule for act in row if act.kind is Kind.RECOMPUTE}
        self.splitting = {act.stage for row in schedule for act in row if act.kind is Kind.WEIGHT}

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses the next instruction of the rank's row, if it may run."""
        rank = replicas[0].rank
        if self.positions[rank] == len(self.schedule[rank]):
            return None
        wanted = self.schedule[rank][self.positions[rank]]
        for replica in replicas:
            if replica.stage == wanted.stage and replica.may_start(wanted.kind, wanted.micro_batch):
                self.positions[rank] += 1
                return replica, wanted.kind
        return None

    def depth(self, pipeline: Pipeline, stage: int, replica: int) -> int:
        """Returns the number of micro-batches: the schedule says how many are in flight."""
        return pipeline.num_micro_batches

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether the schedule recomputes anything at the stage."""
        return stage in self.recomputing

    def splits(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether the schedule computes any weight gradients of the stage apart."""
        return stage in self.splitting

    def explain(self, by_rank: Sequence[Sequence[Replica]]) -> str:
        """Returns the grid with the instruction marked that each rank waits at."""
        return "the schedule never ends; each rank waits at the mark:\n" + grid(
            self.schedule, dict(enumerate(self.positions))
        )
