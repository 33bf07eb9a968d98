"""Defines `RingSender`: the end of a ring that sends."""

from __future__ import annotations

import ctypes
from collections import deque
from mmap import mmap

from torch import Tensor

from autovaruna.runtime.worlds.rings.memory import (
    BLOCK,
    FIRST_SLOT,
    HEADER_BYTES,
    IS_FULL,
    KEY,
    LENT_START,
    NEXT_SLOT,
    NUM_BYTES,
    NUMBER_BYTES,
    PASSING_START,
    SIZE,
    SLOT_BYTES,
    Blocks,
    Shared,
)
from autovaruna.runtime.worlds.world import DONE, Pending


class RingSender:
    """Sends messages, each at once if there is room.

    Args:
        memory: What both ends see; zero at first.
    """

    def __init__(self, memory: mmap) -> None:
        self._shared = Shared(memory)
        self._slot = FIRST_SLOT
        self._lent = Blocks(self._shared, LENT_START, PASSING_START)
        self._passing = Blocks(self._shared, PASSING_START, NUM_BYTES)
        self._left: deque[Departure] = deque()

    def send(self, tensor: Tensor, key: int) -> Pending:
        """Sends the memory of a dense host tensor at once, or when there is room.

        Args:
            tensor: At most `MAX_BYTES`.
            key: Tells streams of messages apart; each arrives in order.
        """
        if self.put(tensor, key):
            return DONE
        departure = Departure(self, tensor, key)
        self._left.append(departure)
        return departure

    def advance(self) -> None:
        """Sends what has found no room, as far as there is some now."""
        left, self._left = self._left, deque()
        while left and self.put(left[0].tensor, left[0].key):
            left.popleft().has_left = True
        self._left = left

    def put(self, tensor: Tensor, key: int) -> bool:
        """Sends at once if there is room, as `send`; says whether."""
        shared, slot = self._shared, self._slot
        numbers = shared.numbers
        if self._left or numbers[slot]:
            return False
        num_bytes = tensor.nbytes
        block = 0
        if num_bytes > SLOT_BYTES:
            block = self._lent.take(num_bytes) or self._passing.take(num_bytes)
            if not block:
                return False
        ctypes.memmove(shared.address + (block or slot * NUMBER_BYTES) + HEADER_BYTES, tensor.data_ptr(), num_bytes)
        numbers[slot + KEY] = key
        numbers[slot + SIZE] = num_bytes
        numbers[slot + BLOCK] = block
        numbers[slot + IS_FULL] = 1  # last: the other end reads the rest once it sees this
        self._slot = NEXT_SLOT[slot]
        return True


class Departure(Pending):
    """A message that waits for room."""

    __slots__ = ("_ring", "has_left", "key", "tensor")
    needs_calls = True

    def __init__(self, ring: RingSender, tensor: Tensor, key: int) -> None:
        self._ring = ring
        self.tensor = tensor
        self.key = key
        self.has_left = False

    def is_done(self) -> bool:
        """Says whether it has left."""
        if not self.has_left:
            self._ring.advance()
        return self.has_left

    def wait(self) -> None:
        """Blocks until it has left; messages wait for all their parts together instead, and watch the others."""
        while not self.is_done():
            pass
