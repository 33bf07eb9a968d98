"""Defines `Ways`: how ranges of segments may run in the memory that there is, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.costs import Array
from autovaruna.planner.memory.stage_bytes import StageBytes


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to run ranges, the fastest first: without recompute, and with it; seconds, and bytes."""

    options: tuple[tuple[Array, StageBytes[Array]], ...]

    def up_to(self, width: int) -> Ways:
        """Returns the same for the first columns alone, as many as `width`."""
        return Ways(tuple((work[:, :width], held.map(lambda table: table[:, :width])) for work, held in self.options))

    def within(self, limit_bytes: float, share: int) -> WaysWithin:
        """Returns how deep each way may go within a limit; a replica has `share` micro-batches."""
        deepest = [num_bytes.depth_within(limit_bytes, share) for _, num_bytes in self.options]
        seconds = tuple(seconds for seconds, _ in self.options)
        return WaysWithin(seconds, tuple(deepest), np.logical_or.reduce([depth >= 1 for depth in deepest]))


@dataclass(frozen=True, slots=True)
class WaysWithin:
    """Ways to run ranges within a limit of memory, the fastest first.

    Attributes:
        seconds: of each way.
        deepest: the greatest in-flight depth at which it fits; 0 or less: it does not.
        is_possible: whether a range fits in any way.
    """

    seconds: tuple[Array, ...]
    deepest: tuple[Array, ...]
    is_possible: NDArray[np.bool_]

    def up_to(self, width: int) -> WaysWithin:
        """Returns the same for the first columns alone, as many as `width`."""
        if width == self.is_possible.shape[1]:
            return self
        seconds, deepest = (tuple(each[:, :width] for each in tables) for tables in (self.seconds, self.deepest))
        return WaysWithin(seconds, deepest, self.is_possible[:, :width])

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
