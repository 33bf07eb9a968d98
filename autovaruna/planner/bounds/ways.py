"""Defines `Way`: a way to run every range of segments, and how long that takes for the depth that it leaves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.costs import Array

# Times of the simulator are rounded to 2**-40 s; a bound stays below by more than all roundings together.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run every range.

    Attributes:
        work: seconds of one micro-batch; `again` the recompute's part of it.
        trip: seconds between a forward and its backward.
        depth: the greatest in-flight depth; 0: no room.
        is_full: whether all micro-batches have to be in flight.
    """

    work: Array
    again: Array
    trip: Array
    depth: Array
    is_full: bool

    @property
    def _round_trip(self) -> Array:
        return np.asarray(self.work - self.again + np.maximum(self.trip, self.again))

    def only(self, which: NDArray[np.bool_]) -> Way:
        """Returns the way to run some of the ranges."""
        return Way(self.work[which], self.again[which], self.trip[which], self.depth[which], self.is_full)

    def busy_share(self, spare: Array) -> Array:
        """Returns the most micro-batches whose work fits into the spare seconds, however long they are in flight."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.floor(np.where(self.work > 0, spare / self.work + ROUNDING, np.inf))
        return np.asarray(np.where(np.isfinite(self.work), np.maximum(share, 0.0), 0.0))

    def greatest_share(self, spare: Array) -> Array:
        """Returns the most micro-batches that one replica finishes in the spare seconds, 0 if none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.floor(np.where(self.work > 0, spare / self.work + ROUNDING, np.inf))
            round_trip = self._round_trip
            rounds = np.floor(np.where(round_trip > 0, spare / round_trip + ROUNDING, np.inf))
            within = np.where(self.depth > 0, self.depth * np.maximum(rounds, 0), 0.0)
            both = np.floor((spare - 2 * self.trip + 2 * self.again) / self.work + ROUNDING) + self.depth - 1
        if self.is_full:
            within = self.depth
        else:
            within = np.minimum(within, np.where(self.depth > 0, np.maximum(self.depth, both), 0.0))
        return np.asarray(np.where(np.isfinite(self.work), np.minimum(share, within), 0.0))

    def work_seconds(self, share: int, busy: Array) -> Array:
        """Returns the least seconds from the first forward to the last backward of a replica.

        Args:
            share: its micro-batches.
            busy: seconds that it works.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            rounds = np.where(self.depth > 0, np.ceil(share / self.depth), np.inf)
        seconds = np.maximum(busy, np.maximum(rounds, 1.0) * self._round_trip)
        with np.errstate(invalid="ignore"):
            both = (share + 1 - self.depth) * self.work - 2 * self.again + 2 * self.trip
        seconds = np.where(self.depth < share, np.maximum(seconds, both), seconds)
        return np.where(self.depth >= (share if self.is_full else 1), seconds, np.inf)
