"""Bounds what the stage of each range waits for: a stage is one piece, and waits for what any of its blocks needs.

waits.py asks the first block of a stage alone, since whoever has only a start knows no more. Where the first block
needs nothing (a counter of batches, a mask) that says nothing; here the rest of the stage is asked too, on the way
there and on the way back, and of later stages the one that is next to use a value, wherever it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autovaruna.graph.records import Value
from autovaruna.planner.costs import Array
from autovaruna.planner.sized import Sized
from autovaruna.planner.waits import Waits, fastest_link, waits_of

_Holders = dict[int, list[int]]
"""For each block, the blocks before it that were the last to hold a value that it uses."""


@dataclass(frozen=True, slots=True)
class RangeWaits:
    """Least seconds of other stages, by ``[i, j]`` of a stage of the segments i .. j-1.

    Attributes:
        before: before its first forward.
        after: after its last backward, until the step ends.
        trip: by j alone, between a forward and its backward.
        line: by the position of a cut, of each message between the stages that meet there.
    """

    before: Array
    after: Array
    trip: Array
    line: Array


def range_waits_of(sized: Sized, *, is_exact: bool) -> RangeWaits:
    """Returns the least waits of a problem, on its fastest ranks and links.

    Args:
        sized: the problem at M micro-batches.
        is_exact: False if cuts may lie inside of segments: i and j are then those in which a stage begins and ends.
    """
    problem, waits, positions = sized.problem, waits_of(sized), sized.tables.positions
    cluster, values = problem.cluster, problem.graph.values
    gradients = [value for value in values if value.needs_gradient and problem.needs_gradient]
    once, speed = fastest_link(cluster).latency_seconds + cluster.overhead_seconds, max(cluster.speeds)
    there, back = _holders(values), _holders(gradients)
    trips = _trips(back, sized.urgent_seconds / speed, waits)
    line = np.maximum(waits.activation, waits.gradient)
    fills = (
        _fill(there, sized.costs.forward_seconds / speed, once, waits.activation, positions, is_exact),
        _fill(back, sized.backward_seconds / speed, once, waits.gradient, positions, is_exact),
    )
    if is_exact:
        return RangeWaits(*fills, trips[positions], line[positions])
    return RangeWaits(*fills, _least_inside(trips, positions), np.zeros(len(positions)))


def _holders(values: Iterable[Value]) -> _Holders:
    found: dict[int, set[int]] = {}
    for value in values:
        for holder, user in pairwise(sorted({value.producer, *value.consumers})):
            found.setdefault(user, set()).add(holder)
    return {user: sorted(holders) for user, holders in found.items()}


def _fill(
    holders: _Holders, seconds: Array, once: float, messages: Array, positions: NDArray[np.int64], is_exact: bool
) -> Array:
    """Returns the least waits of every range.

    A stage from block p to block q waits for the stages that were the last to hold what it uses. The one that holds
    block h starts at some block i, has waited itself, and works till the end of h at least.

    Args:
        holders: whom each block waits for.
        seconds: of each block.
        once: seconds that a message takes whatever its bytes.
        messages: by block p, seconds of the bytes that block p - 1 has and block p uses.
        positions: where segments start, and the end.
        is_exact: whether stages start there and nowhere else.
    """
    n = len(seconds)
    work = np.append(0.0, np.cumsum(seconds))
    fill, from_neighbour, slack = np.zeros(n), np.zeros(n), np.zeros(n)
    table = np.zeros((len(positions), len(positions)))
    columns, starts = {int(position): column for column, position in enumerate(positions)}, positions[:-1]
    for q in range(n):
        for h in holders.get(q, ()):
            since = work[h + 1] + slack[h]
            np.maximum(fill[h + 1 : q + 1], since, out=fill[h + 1 : q + 1])
            if h == q - 1:
                from_neighbour[q] = since + messages[q]
        slack[q] = (fill[: q + 1] - work[: q + 1]).min()
        if q + 1 in columns:
            filled, near = (fill[starts], from_neighbour[starts]) if is_exact else (fill, from_neighbour)
            waits = np.where(filled > 0, np.maximum(filled, near) + once, 0.0)
            table[:-1, columns[q + 1]] = waits if is_exact else np.minimum.reduceat(waits, starts)
    return table


def _trips(holders: _Holders, seconds: Array, waits: Waits) -> Array:
    """Returns, by block p, the least seconds of later stages between a forward and its backward of one that ends there.

    A value that block p - 1 is the last to hold before block u goes to the stage with block u. That one starts at u or
    before, ends anywhere behind, and waits in its turn. If u is p, `waits.trip` knows the messages too.
    """
    n = len(seconds)
    work = np.append(0.0, np.cumsum(seconds))
    users: dict[int, list[int]] = {}
    for user, each in holders.items():
        for holder in each:
            users.setdefault(holder + 1, []).append(user)
    trips, earliest = np.zeros(n + 1), np.full(n + 2, work[n])
    for p in range(n - 1, 0, -1):
        trips[p] = max([waits.trip[p], *(earliest[u + 1] - work[u] for u in users.get(p, ()))])
        earliest[p] = min(earliest[p + 1], work[p] + trips[p])
    return trips


def _least_inside(waits: Array, positions: NDArray[np.int64]) -> Array:
    """Returns the least of each segment, and of the end."""
    return np.append(np.minimum.reduceat(waits[:-1], positions[:-1]), waits[-1])
