"""Defines `Places`: where tensors and small pieces lie on a heap, of which several holders may share one."""

from __future__ import annotations

from collections.abc import Iterable

from autovaruna.planner.memory.chances import Pieces
from autovaruna.planner.memory.heap import Heap

_LEAST_BYTES = 1 << 6


class Places:
    """Takes places on a heap, and gives them back when nobody holds them.

    Args:
        heap: The heap.
    """

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self._shared: list[int] = []

    def share(self, places: list[int]) -> list[int]:
        """Returns the same places for one more holder."""
        self._shared += places
        return list(places)

    def added_up(self, first: list[int], second: list[int], num_bytes: float, is_apart: bool) -> list[int]:
        """Returns where the sum of two gradients lies: where the first one does, unless `is_apart` or it is shared."""
        is_apart = is_apart or any(place in self._shared for place in first)
        total = self.take(num_bytes) if is_apart else first
        self.give(second)
        if is_apart:
            self.give(first)
        return total

    def follow(self, steps: Iterable[int], taken: list[list[int]]) -> None:
        """Takes and gives back as recorded; `taken` are the places by number."""
        for step in steps:
            if step > 0:
                taken.append(self.take(step))
            else:
                self.give(taken[-step - 1])
                taken[-step - 1] = []

    def take_small(self, pieces: Pieces) -> list[int]:
        """Returns where small pieces lie that stay; others are gone."""
        places = [(self.heap.take_small(num_bytes), stays) for num_bytes, stays in pieces]
        self.give(place for place, stays in places if not stays)
        return [place for place, stays in places if stays]

    def take_alike(self, num_bytes: float, count: float) -> list[int]:
        """Takes so many tensors of one size, the last one as small as the count says."""
        whole = int(count)
        sizes = [num_bytes] * whole + [num_bytes * (count - whole)]
        return [place for size in sizes for place in self.take(size)]

    def take(self, num_bytes: float) -> list[int]:
        """Returns where it is put; nowhere if it is next to nothing."""
        return [self.heap.take(int(num_bytes))] if num_bytes >= _LEAST_BYTES else []

    def give(self, places: Iterable[int]) -> None:
        """Lets go of places, which are free if no other holder is left."""
        for place in places:
            if place in self._shared:
                self._shared.remove(place)
            else:
                self.heap.give(place)
