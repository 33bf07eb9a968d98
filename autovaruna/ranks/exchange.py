"""Defines `RankExchange`: what all ranks tell each other at once, in about log2(n) messages of each.

    record   one for all: digests of what must be alike, each beside its complement, and flags. Those of all ranks are
             joined by bitwise or: where a digest and a complement share a bit, ranks differ
    block    bytes of each rank, as numbers that differ; every rank has those of all at the end

MPI joins records by itself, and blocks then go only if they differ. Blocks, and records over other transports, go as in
Bruck et al. ("Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS
8 (11), 1997, section 3): in round k rank r sends what it has to rank r + 2^k, and has twice as much afterwards.

    5 ranks, blocks of rank 0     0 | 0 4 | 0 4 3 2 | 0 4 3 2 1

Open MPI's own non-blocking all-gather has a message, and so a connection, for each pair of ranks.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise

from autovaruna.ranks.transport.base import TensorTransfer, Transport

LABEL, ALIKE, BLOCK, _FLAGS = 0, 2, 4, 6
"""Where a record has the digest of each, with its complement behind it."""
FAILED = 1
"""The flag of a rank that has an error; others are free."""
_RECORD = struct.Struct("=7Q")
_PART = struct.Struct("<BIBI")
"""A byte that no notice begins with, the exchange, the round, and the number of blocks."""
_MARK = 0
_ALL_BITS = (1 << 64) - 1
_MOST_LETTERS = 400  # of what a rank has that another one has not, in an error

Parts = dict[tuple[int, int], bytes | bytearray]
"""Messages of exchanges that have come, by exchange and round."""


def digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def keep_part(data: bytes | bytearray, parts: Parts) -> bool:
    """Keeps what has come if it is a message of an exchange, and says whether it is."""
    if data[0] != _MARK:
        return False
    _, number, turn, _ = _PART.unpack_from(data)
    parts[number, turn] = data
    return True


class RankExchange(TensorTransfer):
    """One exchange, as one rank sees it; all ranks start theirs in one order, which `number` counts.

    Attributes:
        flags: those that any rank has set, once it is done.
    """

    def __init__(
        self, transport: Transport, parts: Parts, number: int, digests: tuple[int, int], flags: int, block: bytes | None
    ) -> None:
        self._transport, self._parts, self._number = transport, parts, number
        self._num_ranks, self._turn = len(transport.hosts), 0
        self._lengths, self._data = ([], b"") if block is None else ([len(block)], block)
        found = (*digests, 0 if block is None else digest(block))
        self._words = [word for each in found for word in (each, each ^ _ALL_BITS)] + [flags]
        self._record = bytearray(_RECORD.pack(*self._words))
        self._reduction = transport.start_or(self._record) if self._num_ranks > 1 else None
        self._has_ended = self._num_ranks == 1
        if self._reduction is None and not self._has_ended:
            self._send()

    @property
    def flags(self) -> int:
        return self._words[_FLAGS]

    @property
    def needs_notices(self) -> bool:
        """Whether a message of it is to come as a notice."""
        return self._reduction is None and not self._has_ended

    def differs(self, place: int) -> bool:
        """Says whether ranks passed other ones, once it is done."""
        return bool(self._words[place] & self._words[place + 1])

    def is_done(self) -> bool:
        if self._reduction is not None:
            if not self._reduction.is_done():
                return False
            self._reduction, self._words = None, list(_RECORD.unpack(self._record))
            self._has_ended = self.differs(LABEL) or self.differs(ALIKE) or not self.differs(BLOCK)
            if not self._has_ended:
                self._send()
        while not self._has_ended:
            part = self._parts.pop((self._number, self._turn), None)
            if part is None:
                return False
            self._join(part)
        return True

    def _send(self) -> None:
        """Sends what this rank has in a round, its own block first, up to what is lacking there."""
        step = 1 << self._turn
        lengths = self._lengths[: min(step, self._num_ranks - step)]
        head = _PART.pack(_MARK, self._number, self._turn, len(lengths)) + _RECORD.pack(*self._words)
        sizes = struct.pack(f"<{len(lengths)}I", *lengths)
        data = head + sizes + self._data[: sum(lengths)]
        self._transport.send_notice(data, (self._transport.rank + step) % self._num_ranks)

    def _join(self, part: bytes | bytearray) -> None:
        """Takes what has come in a round, and sends what is due in the next."""
        num_blocks = _PART.unpack_from(part)[-1]
        theirs = _RECORD.unpack_from(part, _PART.size)
        self._words = [own | other for own, other in zip(self._words, theirs, strict=True)]
        start = _PART.size + _RECORD.size
        self._lengths += struct.unpack_from(f"<{num_blocks}I", part, start)
        self._data += part[start + 4 * num_blocks :]
        self._turn += 1
        self._has_ended = 1 << self._turn >= self._num_ranks
        if not self._has_ended:
            self._send()

    def blocks(self) -> list[bytes]:
        """Returns the block of each rank, once it is done, if ranks passed the same label and the same to be alike."""
        if not self.differs(BLOCK):
            return [self._data[: self._lengths[0]]] * self._num_ranks
        ends = pairwise(accumulate(self._lengths, initial=0))
        blocks = [self._data[start:end] for start, end in ends]
        return [blocks[(self._transport.rank - rank) % self._num_ranks] for rank in range(self._num_ranks)]

    def numbers(self) -> list[array[float]]:
        """Returns the numbers of each rank, whose blocks are float64."""
        return [array("d", block) for block in self.blocks()]


def differences(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Returns in words what the first rank that differs from rank 0 has in another way; empty: nothing."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            pairs = [(name, first.get(name, "missing"), other.get(name, "missing")) for name in names[:5]]
            return "; ".join(
                f"{name} is {_excerpt(one, two)} on rank 0, {_excerpt(two, one)} on rank {rank}"
                for name, one, two in pairs
            )
    return ""


def _excerpt(text: str, other: str) -> str:
    """Returns a text, and of a long one the part where it begins to differ from another."""
    if len(text) <= _MOST_LETTERS:
        return text
    place = next((k for k, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), 0)
    begin = max(0, place - _MOST_LETTERS // 4)
    return f"{'...' * (begin > 0)}{text[begin : begin + _MOST_LETTERS]}..."
