"""Defines `RingReceiver`: the end of a ring that receives."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.worlds.rings.memory import (
    BLOCK,
    FIRST_SLOT,
    HEADER_BYTES,
    KEY,
    LENT_START,
    NEXT_SLOT,
    NUMBER_BYTES,
    PASSING_START,
    SIZE,
    Shared,
    borrowed,
)
from autovaruna.runtime.worlds.world import Blank, Pending


class RingReceiver:
    """Receives messages, into memory that is posted for them or as new tensors.

    Args:
        memory: What both ends see; zero at first.
        source: The rank that sends.
    """

    def __init__(self, memory: mmap, source: int) -> None:
        self.source = source
        self.shared = Shared(memory)
        self._slot = FIRST_SLOT
        self._posted: defaultdict[int, deque[Arrival]] = defaultdict(deque)
        self._early: defaultdict[int, deque[_Parcel]] = defaultdict(deque)

    def post(self, tensor: Tensor, key: int) -> Arrival:
        """Posts the receive of the next message under a key into the memory of a dense host tensor."""
        arrival = Arrival(self, tensor)
        if early := self._early.get(key):
            arrival.fill(*early.popleft())
        else:
            self._posted[key].append(arrival)
        return arrival

    def bring(self, blank: Blank, key: int) -> Tensor | None:
        """Returns the next message under a key, which nobody has posted a receive for; None: it is not here yet.

        Raises:
            RankError: it has another number of bytes than `blank`.
        """
        if early := self._early.get(key):
            return self._as_tensor(*early.popleft(), blank)
        shared, slot = self.shared, self._slot
        numbers = shared.numbers
        while numbers[slot]:
            if numbers[slot + KEY] != key:
                self._put_aside(slot)
                slot = self._empty(slot)
                continue
            block = numbers[slot + BLOCK]
            place = shared.address + (block or slot * NUMBER_BYTES) + HEADER_BYTES
            tensor = self._as_tensor(place, numbers[slot + SIZE], block, blank)
            numbers[slot] = 0
            self._slot = NEXT_SLOT[slot]
            return tensor
        return None

    def advance(self) -> None:
        """Takes all messages that are there out of their slots."""
        numbers, slot = self.shared.numbers, self._slot
        while numbers[slot]:
            self._put_aside(slot)
            slot = self._empty(slot)

    def _empty(self, slot: int) -> int:
        """Gives a slot back to the sender, and returns the next one."""
        self.shared.numbers[slot] = 0
        self._slot = NEXT_SLOT[slot]
        return self._slot

    def _put_aside(self, slot: int) -> None:
        """Takes a message where it is wanted, if that is known; else keeps it, in its block or as a copy."""
        parcel, key = self._parcel(slot), self.shared.numbers[slot + KEY]
        if posted := self._posted.get(key):
            posted.popleft().fill(*parcel)
        elif LENT_START <= parcel.block < PASSING_START:
            self._early[key].append(parcel)
        else:
            self._early[key].append(_Parcel(ctypes.string_at(parcel.data, parcel.num_bytes), parcel.num_bytes, 0))
            if parcel.block:
                self.shared.give_back(parcel.block)

    def _parcel(self, slot: int) -> _Parcel:
        numbers = self.shared.numbers
        block = numbers[slot + BLOCK]
        address = self.shared.address + (block or slot * NUMBER_BYTES) + HEADER_BYTES
        return _Parcel(address, numbers[slot + SIZE], block)

    def _as_tensor(self, data: bytes | int, num_bytes: int, block: int, blank: Blank) -> Tensor:
        if num_bytes != blank.num_bytes:
            raise RankError(f"rank {self.source} sent {num_bytes} bytes where {blank.num_bytes} were expected")
        if LENT_START <= block < PASSING_START:
            return borrowed(self.shared, block, blank)
        tensor = torch.empty_strided(blank.shape, blank.strides, dtype=blank.dtype, device="cpu")
        ctypes.memmove(tensor.data_ptr(), data, num_bytes)
        if block:
            self.shared.give_back(block)
        return tensor


class _Parcel(NamedTuple):
    """A message: where it lies or a copy, how many bytes it has, and its block."""

    data: bytes | int
    num_bytes: int
    block: int


class Arrival(Pending):
    """A message that this rank has memory for."""

    __slots__ = ("_num_bytes", "_ring", "_tensor")

    def __init__(self, ring: RingReceiver, tensor: Tensor) -> None:
        self._ring = ring
        self._tensor = tensor
        self._num_bytes = -1

    def fill(self, data: bytes | int, num_bytes: int, block: int) -> None:
        """Takes what has arrived, as it is in a `_Parcel`."""
        self._num_bytes = num_bytes
        ctypes.memmove(self._tensor.data_ptr(), data, min(num_bytes, self._tensor.nbytes))
        if block:
            self._ring.shared.give_back(block)

    def is_done(self) -> bool:
        """Says whether it has arrived; checks the number of bytes."""
        if self._num_bytes < 0:
            self._ring.advance()
            if self._num_bytes < 0:
                return False
        if self._num_bytes != self._tensor.nbytes:
            raise RankError(
                f"rank {self._ring.source} sent {self._num_bytes} bytes where {self._tensor.nbytes} were expected"
            )
        return True

    def wait(self) -> None:
        """Blocks until it has arrived; messages wait for all their parts together instead, and watch the others."""
        while not self.is_done():
            pass
