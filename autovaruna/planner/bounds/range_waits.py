"""Bounds what the stage of each range waits for: a stage is one piece, and waits for what any of its blocks needs.

waits.py asks the first block of a stage alone, since whoever has only a start knows no more. Where the first block
needs nothing (a counter of batches, a mask) that says nothing; here the rest of the stage is asked too, on the way
there and on the way back, and of later stages the one that is next to use a value, wherever it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autovaruna.graph.records import Value
from autovaruna.planner.bounds.waits import Waits, fastest_link, waits_of
from autovaruna.planner.costs import Array
from autovaruna.planner.sized import Sized

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


def range_waits_of(each: Sequence[Sized], *, is_exact: bool) -> list[RangeWaits]:
    """Returns the least waits of a problem at some numbers of micro-batches, on its fastest ranks and links.

    Args:
        each: the problem at M micro-batches, for every M; all at once takes hardly longer than one.
        is_exact: False if cuts may lie inside of segments: i and j are then those in which a stage begins and ends.
    """
    problem, positions = each[0].problem, each[0].tables.positions
    cluster = problem.cluster
    once, speed = fastest_link(cluster).latency_seconds + cluster.overhead_seconds, max(cluster.speeds)
    there, back = _holders(problem.flow.values), _holders(problem.gradient_flow.values)
    waits = [waits_of(sized) for sized in each]
    forward = np.stack([sized.costs.forward_seconds for sized in each]) / speed
    backward = np.stack([sized.backward_seconds for sized in each]) / speed
    before = _fill(there, forward, once, np.stack([one.activation for one in waits]), positions, is_exact)
    after = _fill(back, backward, once, np.stack([one.gradient for one in waits]), positions, is_exact)
    trips = [_trips(back, sized.urgent_seconds / speed, one) for sized, one in zip(each, waits, strict=True)]
    if is_exact:
        lines = [np.maximum(one.activation, one.gradient)[positions] for one in waits]
        return list(map(RangeWaits, before, after, [trip[positions] for trip in trips], lines))
    lines = [np.zeros(len(positions))] * len(each)
    return list(map(RangeWaits, before, after, [_least_inside(trip, positions) for trip in trips], lines))


def _holders(values: Iterable[Value]) -> _Holders:
    found: dict[int, set[int]] = {}
    for value in values:
        for holder, user in pairwise(sorted({value.producer, *value.consumers})):
            found.setdefault(user, set()).add(holder)
    return {user: sorted(holders) for user, holders in found.items()}


def _fill(
    holders: _Holders, seconds: Array, once: float, messages: Array, positions: NDArray[np.int64], is_exact: bool
) -> Array:
    """Returns the least waits of every range, for each row of `seconds` and `messages`.

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
    rows, n = seconds.shape
    work = np.concatenate([np.zeros((rows, 1)), seconds.cumsum(axis=1)], axis=1)
    fill, from_neighbour, slack = np.zeros((rows, n)), np.zeros((rows, n)), np.zeros((rows, n))
    least = np.zeros((rows, n))  # of the waits of all blocks up to each, less the work before them
    starts = positions[:-1]
    waits, table = np.zeros((rows, len(starts))), np.zeros((rows, len(positions), len(positions)))
    columns, changed = {int(position): column for column, position in enumerate(positions)}, 0
    for q in range(n):
        before = q
        for h in holders.get(q, ()):
            since = work[:, h + 1] + slack[:, h]
            np.maximum(fill[:, h + 1 : q + 1], since[:, None], out=fill[:, h + 1 : q + 1])
            before = min(before, h + 1)
            if h == q - 1:
                from_neighbour[:, q] = since + messages[:, q]
        _continue_least(least, fill[:, before : q + 1] - work[:, before : q + 1], before)
        slack[:, q] = least[:, q]
        changed = min(changed, before)  # What is before is as it was for the column before.
        if q + 1 in columns:
            column, first = columns[q + 1], int(starts.searchsorted(changed, side="right")) - 1
            own = starts[first:column]
            where = own if is_exact else slice(own[0], q + 1)
            filled, near = fill[:, where], from_neighbour[:, where]
            new = np.where(filled > 0, np.maximum(filled, near) + once, 0.0)
            waits[:, first:column] = new if is_exact else np.minimum.reduceat(new, own - own[0], axis=1)
            table[:, column, :column] = waits[:, :column]
            changed = q + 1
    return table.swapaxes(1, 2)


def _continue_least(least: Array, values: Array, first: int) -> None:
    """Puts the least of all values up to each into `least`, which knows it before the first of these."""
    if first:
        np.minimum(values[:, 0], least[:, first - 1], out=values[:, 0])
    np.minimum.accumulate(values, axis=1, out=least[:, first : first + values.shape[1]])


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
