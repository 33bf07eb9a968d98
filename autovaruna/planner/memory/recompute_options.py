"""Defines the ways to run ranges in the memory that there is, without recompute and with it, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.cost_table import Array
from autovaruna.planner.memory.stage_memory import StageBytes

# Times of the simulator are rounded to 2**-40 s; a bound stays below by more than all roundings together.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class RecomputeOption:
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

    def only(self, which: NDArray[np.bool_]) -> RecomputeOption:
        """Returns the way to run some of the ranges."""
        return RecomputeOption(self.work[which], self.again[which], self.trip[which], self.depth[which], self.is_full)

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


@dataclass(frozen=True, slots=True)
class RecomputeOptions:
    """Ways to run ranges, the fastest first: without recompute, and with it; seconds, and bytes."""

    options: tuple[tuple[Array, StageBytes[Array]], ...]

    def within(self, limit_bytes: float, share: int) -> RecomputeOptionsWithin:
        """Returns how deep each way may go within a limit; a replica has `share` micro-batches."""
        deepest = [num_bytes.depth_within(limit_bytes, share) for _, num_bytes in self.options]
        seconds = tuple(seconds for seconds, _ in self.options)
        return RecomputeOptionsWithin(seconds, tuple(deepest), np.logical_or.reduce([depth >= 1 for depth in deepest]))


@dataclass(frozen=True, slots=True)
class RecomputeOptionsWithin:
    """Ways to run ranges within a limit of memory, the fastest first.

    Attributes:
        seconds: of each way.
        deepest: the greatest in-flight depth at which it fits; 0 or less: it does not.
        is_possible: whether a range fits in any way.
    """

    seconds: tuple[Array, ...]
    deepest: tuple[Array, ...]
    is_possible: NDArray[np.bool_]

    def allowed_work(self, in_flight: int) -> Array:
        """Returns the seconds of each range in the best way that fits, infinite if none does.

        A range that only fits with fewer micro-batches in flight waits for each of them in proportion.
        """
        fits = self.deepest[0] >= in_flight
        best = np.where(fits, self.seconds[0], np.inf)
        left = np.flatnonzero(~fits & self.is_possible)
        others = [(each.take(left), most.take(left)) for each, most in zip(self.seconds, self.deepest, strict=True)]
        slower = np.full(len(left), np.inf)
        for depth in {in_flight, (in_flight + 1) // 2, 1}:
            for seconds, most in others:
                np.minimum(seconds * (in_flight / depth), slower, out=slower, where=most >= depth)
        best.put(left, slower)
        return best
