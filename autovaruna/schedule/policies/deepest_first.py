"""Defines the schedule of several stages a rank in which the deepest one goes first."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.policy import Choice, Policy, num_in_flight, pick_in_turn
from autovaruna.schedule.replica import Replica


class DeepestFirst(Policy):
    """Runs forwards until the rank, over all its stages, is as far ahead as its backwards need; then both in turn.

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0  .  2B2 2F3 0B1  .  2B3 0B2 0B3
        rank 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 3F2 3B2 1F3 1B1 3F3 3B3 1B2 1B3  .

    In 1F1B each stage takes turns by itself, which leaves ranks with several stages idle. Here the turn is the rank's:
    a backward comes first once the rank holds as many micro-batches in flight as its first stage may, or as it runs
    forwards until the first gradient reaches its last stage (one for each stage from its first to its last, two for
    each one behind). Of several stages the deepest goes first. Each stage still keeps to its own depth. Where stages
    recompute, or differ much, this is often faster than `interleaved`.
    """

    name = "deepest_first"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses a backward if it is the rank's turn, else the deepest forward, else any backward or recompute."""
        is_turn = _is_ahead(replicas)
        return pick_in_turn(replicas, replicas, is_turn=is_turn)


def _is_ahead(replicas: Sequence[Replica]) -> bool:
    """Returns whether a rank has as many micro-batches in flight as it needs; its stages come deepest first."""
    deepest, first = replicas[0], replicas[-1]
    needed = 1 + deepest.stage - first.stage + 2 * deepest.num_later
    held = num_in_flight(replicas)
    return held >= needed and held >= first.depth
