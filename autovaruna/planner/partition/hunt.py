"""Chooses the limits that close in on the optimum where not every limit can be decided."""

from __future__ import annotations

import math

from autovaruna.planner.partition.bounds import Bounds

_CLOSE = 1e-3
_FIRST_STEP = 0.1
_GROWTH = 2.0


class Hunt:
    """Chooses the next limit to decide.

    Attributes:
        low: proven to have no chain.
        high: has a chain, or is not worth the name.
        cap: from here on, proofs take too many downsets.
        floor: up to here, chains are not found among few downsets.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._tolerance = bounds.tolerance
        self.low, self.high = bounds.lower, bounds.upper
        self.cap, self.floor = math.inf, bounds.lower
        self._was_for_proof = False
        self._step = (self.high - self.low) * _FIRST_STEP

    def next_step(self) -> tuple[float, bool] | None:
        """Returns a limit, and whether to prove something about it; ``None`` when there is nothing left to do."""
        top = self.high * (1.0 - self._tolerance)
        near = _CLOSE * self.high
        if self.low >= top:
            return None
        if self.cap > top:
            self._was_for_proof = True
            return (top if self.high - self.low <= near else self.low + min(self._step, (top - self.low) / 2)), True
        can_prove, can_find = self.cap - self.low > near, self.high - self.floor > near
        if not can_prove and not can_find:
            return None
        self._was_for_proof = can_prove and not (can_find and self._was_for_proof)
        if self._was_for_proof:
            return (self.low + self.cap) / 2, True
        return (max(self.floor, self.low) + self.high) / 2, False

    def found(self, load: float) -> None:
        """Notes a chain."""
        self.high = min(self.high, load)

    def refuted(self, load: float) -> None:
        """Notes that a limit has no chain."""
        self._step *= _GROWTH
        self.low = self.high if load >= self.high * (1.0 - self._tolerance) else load

    def gave_up(self, load: float) -> None:
        """Notes that a limit could not be decided."""
        if self._was_for_proof:
            self.cap = min(self.cap, load)
        else:
            self.floor = max(self.floor, load)
