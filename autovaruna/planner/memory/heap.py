"""Models the heap of the C library, which tensors on the CPU lie in: what it takes from the system, holes and all.

For a tensor of n bytes, aligned to 64 as torch's are, glibc asks itself for n + 128; where one lay between others,
n + 112 are free if n is a multiple of 64. So no tensor fits where one of its size has been, unless what lay beside it
is free as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

MAPPED_BYTES = 32 << 20
"""Tensors of this and more lie outside the heap, and go back to the system at once; the most that glibc allows."""


class Heap:
    """Puts a tensor into the smallest free piece that is greater than it, else grows; free neighbours become one piece.

    Attributes:
        num_bytes: what it has taken from the system, and never gives back.
        live_bytes: what is in use; `peak_bytes` at most.
    """

    def __init__(self) -> None:
        self.num_bytes = self.live_bytes = self.peak_bytes = 0
        self._used: dict[int, int] = {}
        self._free: list[tuple[int, int]] = []
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    @property
    def hole_bytes(self) -> int:
        """What it has taken beyond the most that was in use."""
        return self.num_bytes - self.peak_bytes

    def take(self, num_bytes: int) -> int:
        """Returns where a tensor is put."""
        place = bisect_right(self._free, (num_bytes, self.num_bytes))
        if place < len(self._free):
            size, begin = self._free[place]
            self._remove(begin, size)
            self._add(begin + num_bytes, size - num_bytes)
        else:
            begin = self._ends.get(self.num_bytes, self.num_bytes)
            if begin < self.num_bytes:
                self._remove(begin, self.num_bytes - begin)
            self.num_bytes = begin + num_bytes
        self._used[begin] = num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return begin

    def give(self, begin: int) -> None:
        """Takes back what was put there."""
        size = self._used.pop(begin)
        self.live_bytes -= size
        after = self._begins.get(begin + size)
        if after is not None:
            self._remove(begin + size, after)
            size += after
        before = self._ends.get(begin)
        if before is not None:
            self._remove(before, begin - before)
            begin, size = before, size + begin - before
        self._add(begin, size)

    def _add(self, begin: int, size: int) -> None:
        insort(self._free, (size, begin))
        self._begins[begin], self._ends[begin + size] = size, begin

    def _remove(self, begin: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, begin))]
        del self._begins[begin], self._ends[begin + size]
