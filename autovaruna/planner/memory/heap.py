"""Models the heap of the C library, which tensors on the CPU lie in: what it takes from the system, holes and all.

The rules are those of glibc. A piece has 8 bytes of its own, is a multiple of 16, and of 32 at least. It is cut from
the smallest free one that it fits into, else from the end of the heap; free neighbours become one. Tensors are aligned
to 64 as torch's are: for that glibc looks for 112 bytes more than the piece, and gives back what it has not used before
and behind. Where a tensor of n bytes lay between others, n + 112 are free if n is a multiple of 64, and it asks for
n + 128. So no tensor fits where one of its size has been, unless what lay beside it is free as well.

Two more rules decide which holes small pieces spoil, and with that a tenth of some heaps. What becomes free waits until
something is asked for that is not there in just its size. If nothing waits but what the last small piece has left of
its hole, the next one is cut from that, however large it is, and not from the smallest.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

MAPPED_BYTES = 32 << 20
"""Tensors of this and more lie outside the heap, and go back to the system at once; the most that glibc allows."""
_ALIGNMENT, _HEADER, _LEAST = 64, 16, 32
_TO_ALIGN = _ALIGNMENT + _LEAST + 16
_AREA_BITS = 60
"""What was free at the beginning lies so far from what is taken later, and from one another, that they never meet."""
_SMALL = 1024
"""Pieces of less are used again in just their size, oldest first."""


class Heap:
    """Puts a tensor or a small piece into the smallest free piece that it fits into, else grows.

    Args:
        free_bytes: of areas that are free from the beginning, each between what stays.

    Attributes:
        num_bytes: what has been used, which the system never gets back; of areas, up to the last byte that was used.
        live_bytes: tensors in use, mapped ones too; `peak_bytes` at most.
        mapped_bytes: the most of mapped ones.
    """

    def __init__(self, free_bytes: Iterable[int] = ()) -> None:
        self.num_bytes = self.live_bytes = self.peak_bytes = self.mapped_bytes = 0
        self._end = self._live_mapped = self._num_mapped = 0
        self._used: dict[int, tuple[int, int, int]] = {}
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._sorted = Sorted()
        self._left_over = -1
        self._tops = {0: 0}
        for area, num_bytes in enumerate(free_bytes, 1):
            self._tops[area] = area << _AREA_BITS
            self._add(area << _AREA_BITS, num_bytes & -16)

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

    def _find(self, size: int) -> tuple[int, float]:
        """Returns begin and end of what is taken from: the smallest free piece that is large enough, else the end."""
        is_small = size < _SMALL
        begin = self._sorted.pop_exactly(size) if is_small else None
        if begin is None:
            begin = self._find_waiting(size, is_small)
        if begin is None:
            begin = self._sorted.pop(size)
        if begin is None:
            return self._end, math.inf
        end = begin + self._begins.pop(begin)
        del self._ends[end]
        if is_small and end - begin - size >= _LEAST:
            self._left_over = begin + size
        return begin, end

    def _find_waiting(self, size: int, is_small: bool) -> int | None:
        """Returns what waits and is to be used; sorts what it has looked at."""
        while self._waiting:
            begin = next(iter(self._waiting))
            is_alone = is_small and len(self._waiting) == 1 and begin == self._left_over
            waiting = self._waiting.pop(begin)
            if waiting == size or (is_alone and waiting > size + _LEAST):
                return begin
            self._sorted.add(waiting, begin)
        return None

    def _cut(self, begin: int, size: int, end: float, num_bytes: int) -> int:
        """Uses the beginning of what ends there; gives back the rest, unless it is too small for a piece."""
        if end == math.inf:
            self._end = begin + size
        elif end - begin - size < _LEAST:
            size = int(end) - begin
        else:
            self._add(begin + size, int(end) - begin - size)
        self._used[begin + _HEADER] = begin, size, num_bytes
        area = begin >> _AREA_BITS
        if begin + size > self._tops[area]:
            self.num_bytes += begin + size - self._tops[area]
            self._tops[area] = begin + size
        return begin + _HEADER

    def _add(self, begin: int, size: int) -> None:
        self._waiting[begin] = size
        self._begins[begin], self._ends[begin + size] = size, begin

    def _remove(self, begin: int, size: int) -> None:
        if self._waiting.pop(begin, None) is None:
            self._sorted.remove(size, begin)
        del self._begins[begin], self._ends[begin + size]


class Sorted:
    """Free pieces by their size: of small ones of a size the oldest is used first, of others the newest."""

    def __init__(self, free_bytes: Iterable[int] = ()) -> None:
        self._sizes: list[int] = []
        self._begins: dict[int, list[int]] = {}

    def add(self, size: int, begin: int) -> None:
        """Adds a piece; of large ones the first of its size stays to the last."""
        of_size = self._begins.get(size)
        if of_size is None:
            insort(self._sizes, size)
            self._begins[size] = [begin]
        else:
            of_size.insert(0 if size < _SMALL else 1, begin)

    def remove(self, size: int, begin: int) -> None:
        """Removes a piece."""
        of_size = self._begins[size]
        of_size.remove(begin)
        if not of_size:
            self._forget(size)

    def pop_exactly(self, size: int) -> int | None:
        """Removes and returns a small piece of just this size, if there is one."""
        of_size = self._begins.get(size)
        return self._pop(size, of_size, -1) if of_size else None

    def pop(self, least: int) -> int | None:
        """Removes and returns one of the smallest that are large enough, if there is one."""
        place = bisect_left(self._sizes, least)
        if place == len(self._sizes):
            return None
        size = self._sizes[place]
        of_size = self._begins[size]
        return self._pop(size, of_size, -1 if size < _SMALL or len(of_size) == 1 else 1)

    def _pop(self, size: int, of_size: list[int], place: int) -> int:
        begin = of_size.pop(place)
        if not of_size:
            self._forget(size)
        return begin

    def _forget(self, size: int) -> None:
        del self._begins[size], self._sizes[bisect_left(self._sizes, size)]


def _size(num_bytes: int) -> int:
    return max(_LEAST, num_bytes + 23 & -16)
