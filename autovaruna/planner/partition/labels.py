"""Keeps the ways to reach a downset that can still matter, and drops those that another way beats.

A label is one way to place a downset D on a chain of devices. Let S be what its last device holds so far. A net that
is open at D is, for this device,
    free: it has no block on earlier devices (so it costs only if it leaves the device),
    unpaid: it has blocks on earlier devices and none in S (so it costs as soon as the device takes one), or
    paid: it has blocks on earlier devices and in S (its seconds are in the label's use already).
`held` is the set of nets that are not free, `unpaid` a subset of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, weigh

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of one level, one a row.

    Attributes:
        downset: index in the level.
        device: number of devices used, with the last one.
        use: what the last device uses of each resource, shape (labels, resources).
        held, unpaid: sets of nets, shape (labels, words).
        held_seconds: seconds of the nets in `held`.
        start: index of the downset at which the last device started, in the list of starts.
    """

    downset: Ints
    device: Ints
    use: Floats
    held: Words
    unpaid: Words
    held_seconds: Floats
    start: Ints

    def __len__(self) -> int:
        return len(self.downset)

    def take(self, rows: Ints | Bools) -> Labels:
        """Returns the chosen rows."""
        return Labels(*(getattr(self, field.name)[rows] for field in fields(self)))

    def join(self, other: Labels) -> Labels:
        """Returns the rows of both."""
        return Labels(*(np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class NetCosts:
    """Seconds of the nets, as `weigh` wants them, and whether they count for each resource."""

    seconds: Floats
    crossing: Floats


def drop_beaten(labels: Labels, costs: NetCosts) -> Labels:
    """Drops labels that another label of the same downset beats; sorts the rest by downset, device and compute.

    Label a beats b when it uses no more devices and, whatever its last device takes next, uses no more of any
    resource. What nets add in future differs only where a's net is not paid and its state is not b's: there by no
    more than the net's seconds. These are the nets unpaid at a but not at b, and those free at a but not at b.
    """
    rows = np.lexsort((labels.use[:, 0], labels.device, labels.downset))
    for rank in range(_ROUNDS):
        better = _first_of_group(labels.downset[rows]) + rank
        rivals = np.flatnonzero(better < np.arange(len(rows)))
        if not len(rivals):
            break
        keep = np.ones(len(rows), dtype=np.bool_)
        keep[rivals] = ~_beats(labels, rows[better[rivals]], rows[rivals], costs)
        rows = rows[keep]
    return labels.take(rows)


def merge_excess(labels: Labels, most: int, costs: NetCosts) -> tuple[Labels, int]:
    """Replaces all but the first ``most - 1`` labels of each downset by one that beats them all, if there are more.

    The merged label uses the least of everything, so that no plan is lost; but it need not stand for a plan.

    Returns:
        The labels, the merged ones last, and how many those are.
    """
    group = _first_of_group(labels.downset)
    rank = np.arange(len(labels)) - group
    excess = rank >= most - 1
    last = excess & (np.bincount(group, minlength=len(labels))[group] > most)
    if not last.any():
        return labels, 0
    rows = labels.take(last)
    first = np.flatnonzero(np.r_[True, rows.downset[1:] != rows.downset[:-1]])
    held = np.bitwise_or.reduceat(rows.held, first, axis=0)
    merged = Labels(
        rows.downset[first],
        np.minimum.reduceat(rows.device, first),
        np.minimum.reduceat(rows.use, first, axis=0),
        held,
        np.bitwise_and.reduceat(rows.unpaid, first, axis=0),
        weigh(held, costs.seconds),
        rows.start[first],
    )
    return labels.take(~last).join(merged), len(merged)


def _first_of_group(downset: Ints) -> Ints:
    is_first = np.r_[True, downset[1:] != downset[:-1]] if len(downset) else np.zeros(0, dtype=np.bool_)
    return np.maximum.accumulate(np.where(is_first, np.arange(len(downset)), 0))


def _beats(labels: Labels, a: Ints, b: Ints, costs: NetCosts) -> Bools:
    """Tells for each pair of rows whether the first beats the second."""
    beats: Bools = np.logical_and.reduce(labels.use[a] <= labels.use[b], axis=1)
    near = np.flatnonzero(beats)
    a, b = a[near], b[near]
    differ = (labels.unpaid[a] & ~labels.unpaid[b]) | (labels.held[b] & ~labels.held[a])
    most = labels.use[a] + weigh(differ, costs.seconds)[:, None] * costs.crossing
    beats[near] = np.logical_and.reduce(most <= labels.use[b], axis=1)
    return beats
