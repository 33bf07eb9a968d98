"""Defines how the memory that two ranks share is laid out, in one direction, and how parts of it are given away.

    slots       NUM_SLOTS headers, each followed by room for a small message
    lent        blocks of larger messages, which the receiver computes with where they lie
    passing     blocks that the receiver copies at once: what finds no room among those that are lent

Slots are filled and emptied in order:

    slot    0       1       2       3       4       5       6       7
            empty   empty   full    full    full    empty   empty   empty
                            ^ next to be emptied    ^ next to be filled

The sender copies a message into its next slot, or into a block that the slot tells of, and then marks the slot as full.
The receiver copies it to where it is wanted, or lets a tensor lie in the block, and marks the slot as empty. Each waits
for nothing else, and nothing of MPI is called: for a small message its calls, and the agreement of both ends, take
longer than both copies, and of a large one MPI makes a copy that is slower than this one. However long the receiver
keeps what was lent to it, the next message finds room once it has looked at those before.

One end must see what the other has written in the order in which it was written: `opening` knows where that is so.
"""

from __future__ import annotations

import ctypes
import os
from mmap import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autovaruna.planner.memory.lent import COPIED_BYTES, LENT_BYTES, MAX_BYTES
from autovaruna.runtime.worlds.world import Blank

NUMBER_BYTES = 8
HEADER_BYTES = 64
"""Of a slot or a block: a line of a cache, so that neither rank waits for what the other does beside it."""
NUM_SLOTS = 8
SLOT_BYTES = COPIED_BYTES
"""A message that fits into a slot is copied twice, which takes less time than to lend memory."""
_PASSING_BYTES = MAX_BYTES + HEADER_BYTES
IS_FULL, KEY, SIZE, BLOCK = range(4)
"""Where the numbers of a slot's header are, from its start on; block 0: the message follows them."""
_SLOTS = [slot * (HEADER_BYTES + SLOT_BYTES) // NUMBER_BYTES for slot in range(NUM_SLOTS)]
FIRST_SLOT = _SLOTS[0]
NEXT_SLOT = dict(zip(_SLOTS, [*_SLOTS[1:], FIRST_SLOT], strict=True))
"""The slot after each; a slot is named by the number that it starts with."""
LENT_START = NUM_SLOTS * (HEADER_BYTES + SLOT_BYTES)
PASSING_START = LENT_START + LENT_BYTES
NUM_BYTES = PASSING_START + _PASSING_BYTES


class Shared:
    """What one rank sees of the memory.

    Args:
        memory: What both see; zero at first.

    Attributes:
        process: the number of this process.
        numbers: all of it as numbers of 8 bytes.
        address: where it lies here.
    """

    def __init__(self, memory: mmap) -> None:
        self.process = os.getpid()
        self.numbers = memoryview(memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)

    def give_back(self, block: int) -> None:
        """Lets the sender use a block anew; a process that this one has forked has none to give back."""
        if os.getpid() == self.process:
            self.numbers[block // NUMBER_BYTES] = 0


class Blocks:
    """The blocks of the sender in one part of the memory, from the front on; a block starts with whether it is used.

    Args:
        shared: The memory.
        start, end: The part, in bytes.
    """

    def __init__(self, shared: Shared, start: int, end: int) -> None:
        self._numbers = shared.numbers
        self._start, self._end = start, end
        self._used: list[tuple[int, int]] = []

    def take(self, num_bytes: int) -> int:
        """Returns the first place with room for so many bytes behind a header; 0: there is none."""
        needed = HEADER_BYTES + -(-num_bytes // HEADER_BYTES) * HEADER_BYTES
        numbers, used, place, position = self._numbers, self._used, self._start, 0
        while position < len(used):
            begin, end = used[position]
            if not numbers[begin // NUMBER_BYTES]:
                del used[position]  # the receiver has given it back
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
    """Bytes of a block; the block is given back when the last tensor that lies there is gone."""

    shared: Shared | None = None
    block: int = 0

    def __del__(self) -> None:
        if self.shared is not None:
            self.shared.give_back(self.block)


def borrowed(shared: Shared, block: int, blank: Blank) -> Tensor:
    """Returns a tensor that lies in a block, which is given back once nothing lies there.

    Args:
        shared: The memory.
        block: Where the block starts; the tensor's bytes follow its header.
        blank: How it is to be laid out; not empty.
    """
    first = block + HEADER_BYTES
    place = shared.bytes[first : first + blank.num_bytes].view(_Borrowed)
    place.shared, place.block = shared, block
    storage = torch.frombuffer(place, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=blank.dtype, device="cpu").set_(storage, 0, blank.shape, blank.strides)
