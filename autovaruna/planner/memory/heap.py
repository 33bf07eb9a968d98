"""Models the heap of the C library, which tensors on the CPU lie in: what it takes from the system, holes and all.

The rules are those of glibc. A piece has 8 bytes of its own, is a multiple of 16, and of 32 at least. It is cut from
the smallest free one that it fits into, else from the end of the heap; free neighbours become one. Tensors are aligned
to 64 as torch's are: for that glibc looks for 112 bytes more than the piece, and gives back what it has not used before
and behind. Where a tensor of n bytes lay between others, n + 112 are free if n is a multiple of 64, and it asks for
n + 128. So no tensor fits where one of its size has been, unless what lay beside it is free as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

MAPPED_BYTES = 32 << 20
"""Tensors of this and more lie outside the heap, and go back to the system at once; the most that glibc allows."""
_ALIGNMENT, _HEADER, _LEAST = 64, 16, 32
_TO_ALIGN = _ALIGNMENT + _LEAST + 16


class Heap:
    """Puts a tensor or a small piece into the smallest free piece that it fits into, else grows.

    Attributes:
        num_bytes: what it has taken from the system, and never gives back.
        live_bytes: tensors in use, mapped ones too; `peak_bytes` at most.
        mapped_bytes: the most of mapped ones.
    """

    def __init__(self) -> None:
        self.num_bytes = self.live_bytes = self.peak_bytes = self.mapped_bytes = 0
        self._end = self._live_mapped = self._num_mapped = 0
        self._used: dict[int, tuple[int, int, int]] = {}
        self._free: list[tuple[int, int]] = []
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    @property
    def hole_bytes(self) -> int:
        """What it has taken, mapped tensors with it, beyond the most that tensors have used."""
        return self.num_bytes + self.mapped_bytes - self.peak_bytes

    def take(self, num_bytes: int) -> int:
        """Returns where a tensor is put; a number below zero if it lies outside."""
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if num_bytes >= MAPPED_BYTES:
            return self._map(num_bytes)
        size = _size(num_bytes)
        begin, end = self._find(size + _TO_ALIGN)
        unused = -(begin + _HEADER) % _ALIGNMENT
        if 0 < unused < _LEAST:
            unused += _ALIGNMENT
        if unused:
            self._add(begin, unused)
        return self._cut(begin + unused, size, end, num_bytes)

    def take_small(self, num_bytes: int) -> int:
        """Returns where something is put that is no tensor."""
        size = _size(num_bytes)
        begin, end = self._find(size)
        return self._cut(begin, size, end, 0)

    def give(self, place: int) -> None:
        """Takes back what was put there."""
        begin, size, num_bytes = self._used.pop(place)
        self.live_bytes -= num_bytes
        if place < 0:
            self._live_mapped -= num_bytes
            return
        after = self._begins.get(begin + size)
        if after is not None:
            self._remove(begin + size, after)
            size += after
        before = self._ends.get(begin)
        if before is not None:
            self._remove(before, begin - before)
            begin, size = before, size + begin - before
        if begin + size == self._end:
            self._end = begin
        else:
            self._add(begin, size)

    def _map(self, num_bytes: int) -> int:
        self._num_mapped += 1
        self._live_mapped += num_bytes
        self.mapped_bytes = max(self.mapped_bytes, self._live_mapped)
        self._used[-self._num_mapped] = 0, 0, num_bytes
        return -self._num_mapped

    def _find(self, least: int) -> tuple[int, float]:
        """Returns begin and end of what is taken from: the smallest free piece that is large enough, else the end."""
        place = bisect_left(self._free, (least, 0))
        if place == len(self._free):
            return self._end, math.inf
        size, begin = self._free[place]
        self._remove(begin, size)
        return begin, begin + size

    def _cut(self, begin: int, size: int, end: float, num_bytes: int) -> int:
        """Uses the beginning of what ends there; gives back the rest, unless it is too small for a piece."""
        if end == math.inf:
            self._end = begin + size
            self.num_bytes = max(self.num_bytes, self._end)
        elif end - begin - size < _LEAST:
            size = int(end) - begin
        else:
            self._add(begin + size, int(end) - begin - size)
        self._used[begin + _HEADER] = begin, size, num_bytes
        return begin + _HEADER

    def _add(self, begin: int, size: int) -> None:
        insort(self._free, (size, begin))
        self._begins[begin], self._ends[begin + size] = size, begin

    def _remove(self, begin: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, begin))]
        del self._begins[begin], self._ends[begin + size]


def _size(num_bytes: int) -> int:
    return max(_LEAST, num_bytes + 23 & -16)
