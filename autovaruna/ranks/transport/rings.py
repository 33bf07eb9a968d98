"""Carries messages between two ranks of one host through memory that both see.

A ring is memory for one direction, with a `RingSender` and a `RingReceiver`:

    slots       NUM_SLOTS headers, each followed by room for a small message; filled and emptied in turn
    borrowed    blocks of larger messages, which the receiver computes with where they lie
    passing     blocks that the receiver copies at once: messages that find no room among those that are borrowed

The sender copies a message into its next slot, or into a block whose number it writes into the slot, and marks the slot
as full. The receiver copies the message to its place, or makes a tensor of the block, and marks the slot as empty.
However long it borrows blocks, the next message finds room once it has emptied the slots before. Each end must see what
the other writes in the order in which it is written. The memory has no name, and ends with the last process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from mmap import mmap
from secrets import token_bytes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autovaruna.ranks.system import memory_file
from autovaruna.ranks.transport.base import Arrival, Departure, Pair, Swap, TensorTransfer, check_size
from autovaruna.ranks.transport.layout import Layout

NUMBER_BYTES = 8
HEADER_BYTES = 64
"""Of a slot or a block: a line of a cache, so that neither rank waits for what the other does beside it."""
NUM_SLOTS = 8
SLOT_BYTES = 64 << 10
"""A message that fits into a slot is copied twice, which takes less time than to borrow a block."""
MAX_BYTES = 8 << 20
"""Larger messages go another way, and are received into memory that was posted for them."""
BORROWED_BYTES = 32 << 20
"""So much one rank borrows of another at once."""
_PASSING_BYTES = MAX_BYTES + HEADER_BYTES
IS_FULL, KEY, SIZE, BLOCK = range(4)
"""Where the numbers of a slot's header are, from its start on; block 0: the message follows them."""
_SLOTS = [slot * (HEADER_BYTES + SLOT_BYTES) // NUMBER_BYTES for slot in range(NUM_SLOTS)]
FIRST_SLOT = _SLOTS[0]
NEXT_SLOT = dict(zip(_SLOTS, [*_SLOTS[1:], FIRST_SLOT], strict=True))
"""The slot after each; a slot is named by the number that it starts with."""
BORROWED_START = NUM_SLOTS * (HEADER_BYTES + SLOT_BYTES)
PASSING_START = BORROWED_START + BORROWED_BYTES
NUM_BYTES = PASSING_START + _PASSING_BYTES
_TOKEN_BYTES = 16
_ORDERED = ("x86_64", "AMD64")
"""Processors whose cores see each other's writes in the order in which they were made."""
Offer = tuple[str, bytes]
"""Where another process finds memory of this one, and the token by which it knows that it is the right one."""


class Shared:
    """What one rank sees of the memory, which is zero at first: as numbers of 8 bytes, as bytes, and its address."""

    def __init__(self, memory: mmap) -> None:
        self.process = os.getpid()
        self.numbers = memoryview(memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)

    def release(self, block: int) -> None:
        """Lets the sender use a block anew; a process that this one has forked has none to release."""
        if os.getpid() == self.process:
            self.numbers[block // NUMBER_BYTES] = 0


class Blocks:
    """The blocks of the sender from byte `start` to `end` of the memory; a block starts with whether it is used."""

    def __init__(self, shared: Shared, start: int, end: int) -> None:
        self._numbers = shared.numbers
        self._start, self._end = start, end
        self._used: list[tuple[int, int]] = []

    def allocate(self, num_bytes: int) -> int:
        """Returns the first place with room for so many bytes behind a header; 0: there is none."""
        needed = HEADER_BYTES + -(-num_bytes // HEADER_BYTES) * HEADER_BYTES
        numbers, used, place, position = self._numbers, self._used, self._start, 0
        while position < len(used):
            begin, end = used[position]
            if not numbers[begin // NUMBER_BYTES]:
                del used[position]  # the receiver has released it
            elif begin - place >= needed:
                break
            else:
                place, position = end, position + 1
        if position == len(used) and self._end - place < needed:
            return 0
        used.insert(position, (place, place + needed))
        numbers[place // NUMBER_BYTES] = 1
        return place


class _Borrowed(np.ndarray):
    """Bytes of a block, which is released when the last tensor that lies there is gone."""

    shared: Shared | None = None
    block: int = 0

    def __del__(self) -> None:
        if self.shared is not None:
            self.shared.release(self.block)


def borrowed_tensor(shared: Shared, block: int, layout: Layout) -> Tensor:
    """Returns a tensor, not empty, that lies in a block behind its header; both go together."""
    first = block + HEADER_BYTES
    place = shared.bytes[first : first + layout.num_bytes].view(_Borrowed)
    place.shared, place.block = shared, block
    storage = torch.frombuffer(place, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=layout.dtype, device="cpu").set_(storage, 0, layout.shape, layout.strides)


class RingSender:
    """Sends messages, each at once if there is room."""

    def __init__(self, memory: mmap) -> None:
        self._shared = Shared(memory)
        self._slot = FIRST_SLOT
        self._borrowed = Blocks(self._shared, BORROWED_START, PASSING_START)
        self._passing = Blocks(self._shared, PASSING_START, NUM_BYTES)
        self._queued: deque[tuple[Departure, Tensor, int]] = deque()

    def queue(self, tensor: Tensor, key: int) -> TensorTransfer:
        """Sends a tensor as `put`, once there is room."""
        departure = Departure(self, tensor)
        self._queued.append((departure, tensor, key))
        return departure

    def advance(self) -> None:
        """Sends queued messages, as far as there is room now."""
        queued, self._queued = self._queued, deque()
        while queued and self.put(*queued[0][1:]):
            queued.popleft()[0].has_left = True
        self._queued = queued

    def put(self, tensor: Tensor, key: int) -> bool:
        """Sends the memory of a dense host tensor of at most `MAX_BYTES` at once, if there is room; says whether.

        `key` tells streams of messages apart; each arrives in order.
        """
        shared, slot = self._shared, self._slot
        numbers = shared.numbers
        if self._queued or numbers[slot]:
            return False
        num_bytes = tensor.nbytes
        block = 0
        if num_bytes > SLOT_BYTES:
            block = self._borrowed.allocate(num_bytes) or self._passing.allocate(num_bytes)
            if not block:
                return False
        ctypes.memmove(shared.address + (block or slot * NUMBER_BYTES) + HEADER_BYTES, tensor.data_ptr(), num_bytes)
        numbers[slot + KEY] = key
        numbers[slot + SIZE] = num_bytes
        numbers[slot + BLOCK] = block
        numbers[slot + IS_FULL] = 1  # last: the other end reads the rest once it sees this
        self._slot = NEXT_SLOT[slot]
        return True


class RingReceiver:
    """Receives messages, into memory that is posted for them or as new tensors."""

    def __init__(self, memory: mmap, source: int) -> None:
        self.source = source
        self.shared = Shared(memory)
        self._slot = FIRST_SLOT
        self._posted: defaultdict[int, deque[Arrival]] = defaultdict(deque)
        self._early: defaultdict[int, deque[tuple[bytes | int, int, int]]] = defaultdict(deque)
        """Messages: where each lies or a copy, how many bytes it has, and its block."""

    def post(self, tensor: Tensor, key: int) -> Arrival:
        """Posts the receive of the next message under a key into the memory of a dense host tensor."""
        arrival = Arrival(self, self.source, tensor)
        if early := self._early.get(key):
            self._fill(arrival, *early.popleft())
        else:
            self._posted[key].append(arrival)
        return arrival

    def borrow(self, layout: Layout, key: int) -> Tensor | None:
        """Returns the next message under a key, for which no receive is posted; None: it is not here yet.

        Raises:
            RankError: it has another number of bytes than `layout`.
        """
        if early := self._early.get(key):
            return self._as_tensor(*early.popleft(), layout)
        numbers = self.shared.numbers
        while numbers[slot := self._slot]:
            if numbers[slot + KEY] != key:
                self._empty_slot()
                continue
            block = numbers[slot + BLOCK]
            address = self.shared.address + (block or slot * NUMBER_BYTES) + HEADER_BYTES
            tensor = self._as_tensor(address, numbers[slot + SIZE], block, layout)
            numbers[slot] = 0
            self._slot = NEXT_SLOT[slot]
            return tensor
        return None

    def advance(self) -> None:
        """Empties all slots."""
        while self.shared.numbers[self._slot]:
            self._empty_slot()

    def _empty_slot(self) -> None:
        """Copies the next message to the receive that is posted for it; else keeps it, in its block or as a copy."""
        numbers, slot = self.shared.numbers, self._slot
        key, num_bytes, block = numbers[slot + KEY], numbers[slot + SIZE], numbers[slot + BLOCK]
        address = self.shared.address + (block or slot * NUMBER_BYTES) + HEADER_BYTES
        if posted := self._posted.get(key):
            self._fill(posted.popleft(), address, num_bytes, block)
        elif BORROWED_START <= block < PASSING_START:
            self._early[key].append((address, num_bytes, block))
        else:
            self._early[key].append((ctypes.string_at(address, num_bytes), num_bytes, 0))
            if block:
                self.shared.release(block)
        numbers[slot] = 0
        self._slot = NEXT_SLOT[slot]

    def _fill(self, arrival: Arrival, data: bytes | int, num_bytes: int, block: int) -> None:
        ctypes.memmove(arrival.tensor.data_ptr(), data, min(num_bytes, arrival.tensor.nbytes))
        arrival.has_come(num_bytes)
        if block:
            self.shared.release(block)

    def _as_tensor(self, data: bytes | int, num_bytes: int, block: int, layout: Layout) -> Tensor:
        check_size(self.source, num_bytes, layout.num_bytes)
        if BORROWED_START <= block < PASSING_START:
            return borrowed_tensor(self.shared, block, layout)
        tensor = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="cpu")
        ctypes.memmove(tensor.data_ptr(), data, num_bytes)
        if block:
            self.shared.release(block)
        return tensor


class _Memory(NamedTuple):
    """Memory that another process may open until its file is closed."""

    memory: mmap
    offer: Offer
    file: int


def open_rings(
    rank: int, hosts: tuple[str, ...], pairs: Iterable[Pair], can_share: bool, swap: Swap
) -> tuple[dict[int, RingSender], dict[int, RingReceiver]]:
    """Opens a ring for each of the pairs, the same on every rank, that can share memory.

    Returns:
        The rings to other ranks, and those from other ranks, by these. Both ends have a ring, or none.
    """
    near = [(i, j) for i, j in sorted(set(pairs)) if i != j and hosts[i] == hosts[j]]
    if not near:
        return {}, {}
    sources = [source for source, there in near if there == rank and can_share]
    made = {source: memory for source in sources if (memory := _memory()) is not None}
    partners = sorted({other for pair in near if rank in pair for other in pair if other != rank})
    offers = swap({other: made[other].offer if other in made else None for other in partners})
    wanted = {there: offers[there] for source, there in near if source == rank and can_share}
    found = {there: seen for there, offer in wanted.items() if offer and (seen := _memory_of(offer)) is not None}
    reached = swap({other: other in found for other in partners})
    for each in made.values():
        os.close(each.file)
    senders = {there: RingSender(seen) for there, seen in found.items()}
    return senders, {source: RingReceiver(made[source].memory, source) for source in made if reached[source]}


def _memory() -> _Memory | None:
    """Makes memory for a ring; None where it cannot be shared, or writes may be seen in another order."""
    if platform.machine() not in _ORDERED or sys.platform != "linux":
        return None
    try:
        file = memory_file("autovaruna")
    except OSError:
        return None
    try:
        os.ftruncate(file, NUM_BYTES + _TOKEN_BYTES)
        memory = mmap(file, NUM_BYTES + _TOKEN_BYTES)
    except OSError:
        os.close(file)
        return None
    token = token_bytes(_TOKEN_BYTES)
    memory[NUM_BYTES:] = token
    return _Memory(memory, (_path(file), token), file)


def _path(file: int) -> str:
    """Returns where other processes find an open file of this one, as long as it is open."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _memory_of(offer: Offer) -> mmap | None:
    """Returns memory of another process; None: it cannot be reached from here, or something else lies there."""
    path, token = offer
    try:
        file = os.open(path, os.O_RDWR)
        try:
            memory = mmap(file, NUM_BYTES + _TOKEN_BYTES)
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    return memory if memory[NUM_BYTES:] == token else None
