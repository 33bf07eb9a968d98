"""Takes turns between backwards and forwards: what schedules with a steady phase share."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.instruction import BACKWARD, FORWARD, RECOMPUTE
from autovaruna.schedule.policy import Choice
from autovaruna.schedule.replica import Replica


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
