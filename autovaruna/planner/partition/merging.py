"""Merges states of a listing that differ only in what is decided for good, so that least prices take few states.

What may still happen to a state depends on which of the free blocks that are not decided yet are outside, and on which
sides the nets with such blocks have blocks already. Of states alike in this, and nearly alike in seconds, one is kept:
the cheapest. It is given the least figures of them all, so whatever any of them can become within the limits, it can.
"""

from __future__ import annotations

import math

import numpy as np

from autovaruna.planner.partition.listing import Listing, States
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words

_BINS = 8
_GROWTH = 2.0


class Merger:
    """Keeps the states of one listing few.

    Args:
        listing: what decides the states.
        most: how many states are too many.
        width: seconds by which states that are merged may differ; doubled when they stay too many.
        most_width: the greatest width allowed; beyond it, the dearest states are dropped.

    Attributes:
        dropped: no state that was dropped has a smaller price.
    """

    def __init__(self, listing: Listing, most: int, width: float, most_width: float) -> None:
        self._listing, self._most = listing, most
        self._width, self._most_width = width, most_width
        self.dropped = math.inf

    def merge(self, states: States, position: int) -> States:
        """Returns no more than so many states, the blocks before `position` being decided."""
        if len(states) <= self._most:
            return states
        keys = self._listing.what_matters(states, position)
        error = np.maximum(self._listing.decided_seconds(states) - states.used[0] - states.left_out[0], 0.0)
        while True:
            merged = _merge(states, keys, error, self._width)
            if len(merged) <= self._most // 2:
                return merged
            if self._width >= self._most_width:
                return self._drop(merged)
            self._width *= _GROWTH

    def _drop(self, states: States) -> States:
        """Drops the dearest of too many states."""
        if len(states) <= self._most // 2:
            return states
        order = np.argpartition(states.price, self._most // 2)
        self.dropped = min(self.dropped, float(states.price[order[self._most // 2 :]].min()))
        return states.pick(order[: self._most // 2])


def _merge(states: States, keys: Words, error: Floats, width: float) -> States:
    """Merges states with equal columns of keys, no further apart than some seconds with the error they have."""
    least = states.used[0]
    bins = np.floor((least - least.min()) * (_BINS / width)) if width > 0 else least
    mixed = _mix(keys)
    order = np.lexsort((states.price, bins, mixed))
    is_first = np.ones(len(order), dtype=np.bool_)
    same_bin = bins[order[1:]] == bins[order[:-1]]
    is_first[1:] = ~(same_bin & (keys[:, order[1:]] == keys[:, order[:-1]]).all(axis=0))
    is_first = _part_wide(is_first, least[order], (least + error)[order], width)
    first = np.flatnonzero(is_first)
    merged = states.pick(order[first])
    merged.used = np.minimum.reduceat(states.used[:, order], first, axis=1)
    merged.left_out = np.minimum.reduceat(states.left_out[:, order], first, axis=1)
    merged.share = np.minimum.reduceat(states.share[order], first)
    merged.rest = np.minimum.reduceat(states.rest[order], first)
    return merged


def _part_wide(is_first: Bools, least: Floats, most: Floats, width: float) -> Bools:
    """Parts the groups, given by which states begin one, that lie too far apart."""
    first: Ints = np.flatnonzero(is_first)
    span = np.maximum.reduceat(most, first) - np.minimum.reduceat(least, first)
    is_wide = np.repeat(span > width, np.diff(np.append(first, len(is_first))))
    parted: Bools = is_first | is_wide
    return parted


def _mix(keys: Words) -> Words:
    """Returns one word for each column, equal for equal columns and almost always unlike for others."""
    factors = np.random.default_rng(0).integers(0, 2**63, len(keys), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed = np.zeros(keys.shape[1], dtype=np.uint64)
    for row, factor in zip(keys, factors, strict=True):
        mixed = (mixed ^ row) * factor
        mixed ^= mixed >> np.uint64(29)
    return mixed
