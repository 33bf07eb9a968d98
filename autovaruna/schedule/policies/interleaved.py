"""Defines the interleaved 1F1B schedule, for ranks with several stages each."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.policy import Choice, Policy, num_in_flight, pick_in_turn
from autovaruna.schedule.replica import Replica


class Interleaved(Policy):
    """Takes as many micro-batches through a stage as there are ranks before any goes through the rank's next stage.

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
        rank 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .

    Such a *round* keeps a stage at work while its activations arrive one by one. Of several stages that of the earliest
    round goes first; within a round the first stage forward, the last one backward. Each rank takes turns as a whole:
    forwards run until the last of its stages has begun and a gradient can have come back to it (two for each stage
    behind), then both in turn. What is late gives way to whatever else may run, so each stage keeps to its own depth.
    With equal stages, v of them on each of P ranks in turn, a step takes ``(P - 1) / v`` micro-batches longer than the
    work alone, for P - 1 with one stage a rank. Micro-batches that are no multiple of P make longer rounds.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 2.2, where
        the order is a fixed table for multiples of P micro-batches.
    """

    name = "interleaved"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses a backward if it is the rank's turn, else a forward, else any backward or recompute."""
        backwards = [each for each in replicas if each.has_gradient or each.can_recompute]
        forwards = [each for each in replicas if each.can_forward]
        if not (backwards or forwards):
            return None
        num_rounds = _num_rounds(replicas)
        if len(backwards) > 1:
            backwards.sort(key=lambda each: (_round(each, each.backwards, num_rounds), -each.stage))
        if len(forwards) > 1:
            forwards.sort(key=lambda each: (_round(each, each.forwards, num_rounds), each.stage))
        is_turn = bool(backwards) and _is_ahead(replicas, num_rounds)
        return pick_in_turn(backwards, forwards, is_turn=is_turn)


def _num_rounds(replicas: Sequence[Replica]) -> int:
    """Returns how many rounds a rank makes, each of as many micro-batches as lie stages between two of its own."""
    deepest, first = replicas[0], replicas[-1]
    apart = (deepest.stage - first.stage) // max(1, len(replicas) - 1)
    return max(1, first.num_micro_batches // max(1, apart))


def _round(replica: Replica, k: int, num_rounds: int) -> int:
    """Returns the round of a replica's k-th micro-batch; rounds differ by one micro-batch at most."""
    return ((k + 1) * num_rounds - 1) // max(1, replica.num_micro_batches)


def _is_ahead(replicas: Sequence[Replica], num_rounds: int) -> bool:
    """Returns whether a rank runs forwards no longer: its last stage has begun, and gradients can be on their way."""
    deepest = replicas[0]
    longest = -(-deepest.num_micro_batches // num_rounds)
    needed = 1 + (len(replicas) - 1) * longest + 2 * deepest.num_later
    return num_in_flight(replicas) >= needed
