"""Remembers where devices start, so that a chain can be read back from its last device."""

from __future__ import annotations

import numpy as np

from autovaruna.planner.partition.lattice import Level
from autovaruna.planner.partition.words import Ints, unpack

_SAME = -1


class Starts:
    """A numbered list of downsets at which a device starts, each with the start of the device before.

    The first device's start, at the empty downset, has number -1.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[Ints, Ints, int]] = []
        self._first = [0]

    def add(self, earlier: Ints, downset: Ints, size: int) -> Ints:
        """Notes starts at downsets of one size and returns their numbers."""
        self._batches.append((earlier, downset, size))
        self._first.append(self._first[-1] + len(downset))
        return np.arange(self._first[-2], self._first[-1])

    def repeat(self, start: Ints) -> Ints:
        """Gives starts a second number each: for labels that are not the ones that began there."""
        return self.add(start.copy(), start, _SAME)

    def chain(self, start: int, levels: list[Level]) -> tuple[int, ...]:
        """Follows a start back to the first device and returns the downsets at which devices end."""
        chain = [unpack(levels[-1].downsets[0])]
        while start >= 0:
            batch = int(np.searchsorted(self._first, start, side="right")) - 1
            earlier, downset, size = self._batches[batch]
            row = start - self._first[batch]
            if size != _SAME:
                chain.append(unpack(levels[size].downsets[downset[row]]))
            start = int(earlier[row])
        return tuple(reversed(chain))
