"""Defines `Policy`, which chooses the next instruction of a rank; for ranks with several stages, by turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from autovaruna.schedule.instruction import BACKWARD, FORWARD, RECOMPUTE, Kind
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.replica import Replica

Choice = tuple[Replica, Kind]


class Policy(ABC):
    """Chooses the order of instructions; one policy is one schedule.

    A policy that never waits while something may run (*work-conserving*) cannot deadlock, for any placement and any
    depth of at least 1. Proof: take the smallest micro-batch m with something left to do. If a forward is left, the
    earliest such stage has its inputs, has forwarded all smaller micro-batches, and holds none in flight, since those
    are done; so it may run. Otherwise the latest stage with a backward left has its gradients, and may run, unless so
    many weight gradients are deferred that the first of them must come before; and that one may run.
    """

    name: str

    @abstractmethod
    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses what an idle rank runs next.

        Args:
            replicas: the rank's stages, deepest first; their ``can_*`` say what may run now.

        Returns:
            A replica and the kind of its next instruction, or None to wait.
        """

    def depth(self, pipeline: Pipeline, stage: int, replica: int) -> int:
        """Returns the most forwards not yet backwarded that the policy lets one replica hold.

        Raises:
            ScheduleError: the plan's depth is too small for this policy.
        """
        return pipeline.stages[stage].in_flight

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether this policy runs a recompute before each backward of the stage."""
        return pipeline.recomputes(stage)

    def splits(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether this policy computes the weight gradients of the stage apart from its backwards."""
        return False

    def num_instructions(self, pipeline: Pipeline) -> int:
        """Returns how many instructions the ranks run in a step."""
        stages = range(pipeline.num_stages)
        backward = (1 + self.recomputes(pipeline, s) + self.splits(pipeline, s) for s in stages)
        return pipeline.num_micro_batches * (len(stages) + (sum(backward) if pipeline.needs_gradients else 0))

    def explain(self, by_rank: Sequence[Sequence[Replica]]) -> str:
        """Returns the error of a policy that left all ranks waiting."""
        rows = [f"rank {r} | " + " ".join(str(x) for x in reversed(row)) for r, row in enumerate(by_rank)]
        return f"policy {self.name} waits on every rank; a policy must pick something that may run:\n" + "\n".join(rows)


def pick_in_turn(
    backwards: Sequence[Replica], forwards: Sequence[Replica], *, is_turn: bool | None = None
) -> Choice | None:
    """Chooses a backward whose turn it is, else the first forward, else any backward, else a recompute.

    Args:
        backwards, forwards: the rank's stages, in the order in which they are to go backward and forward.
        is_turn: whether stages are to go backward before anything goes forward; None: those that are full. One that has
            recomputed is so anyway.
    """
    for replica in backwards:
        if replica.has_gradient and (replica.is_recomputed or (replica.is_full if is_turn is None else is_turn)):
            return _backward(replica)
    for replica in forwards:
        if replica.can_forward:
            return replica, FORWARD
    for replica in backwards:
        if replica.has_gradient:
            return _backward(replica)
    for replica in backwards:
        if replica.can_recompute:
            return replica, RECOMPUTE
    return None


def num_in_flight(replicas: Sequence[Replica]) -> int:
    """Returns how many forwards a rank has not yet gone backward for, over all its stages."""
    held = 0
    for each in replicas:
        held += each.forwards - each.backwards
    return held


def _backward(replica: Replica) -> Choice:
    return replica, BACKWARD if replica.can_backward else RECOMPUTE
