"""Defines the sums and copies among a group of ranks, made of messages.

A sum has one order, that of `ranks`, whatever the size of the tensor or of the group, and each element is summed on
one rank (or, for small tensors, in the same way on each): so every rank gets the same bits, and a second run too.

    small tensor   every rank sends it whole to every other, and sums                        1 message time
    large tensor   rank i of n gets the i-th n-th of it from all, sums it, sends it to all   2 (n-1)/n of its bytes,
                                                                                             the least there is

(Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4;
theirs are trees and rings with fewer messages for large n, whose sums have other orders.)
"""

from __future__ import annotations

import zlib
from collections import deque
from functools import partial

import torch
from torch import Tensor

from autovaruna.runtime.deadlock import Event, Need, Watch
from autovaruna.runtime.transport.base import GROUP_CHANNEL, Part, Pending, Transport, flat, to_host

SMALL_BYTES = 16 << 10
PIECE_BYTES = 1 << 20
BYTES_AT_ONCE = 4 << 20
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def group_tag(ranks: tuple[int, ...]) -> int:
    """Returns a tag, a multiple of 4, that every rank of the group computes alike."""
    return (zlib.crc32(repr(ranks).encode()) >> 4) & ~3


class Group:
    """The sums of one tuple of ranks: their pieces go in the order started, a few at once."""

    def __init__(self, transport: Transport, watch: Watch, ranks: tuple[int, ...]) -> None:
        self.transport = transport
        self.watch = watch
        self.ranks = ranks
        self.tag = group_tag(ranks)
        self.num_calls = 0
        self._coming: deque[Piece] = deque()
        self.active: deque[Piece] = deque()
        self._num_active_bytes = 0

    def start(self, tensor: Tensor) -> AllReduce:
        """Starts the sum of a tensor."""
        self.count_call()
        reduction = AllReduce(self, tensor)
        self._coming.extend(reduction.pieces)
        self.advance()
        return reduction

    def advance(self) -> None:
        """Lets the pieces advance; a later one may not come to its second exchange before an earlier one."""
        self._fill()
        for piece in self.active:
            if not piece.advance():
                break
        while self.active and self.active[0].is_finished:
            self._num_active_bytes -= self.active.popleft().num_bytes
            self._fill()

    def _fill(self) -> None:
        while self._coming and (not self.active or self._num_active_bytes < BYTES_AT_ONCE):
            piece = self._coming.popleft()
            piece.exchange(self)
            self.active.append(piece)
            self._num_active_bytes += piece.num_bytes

    def is_idle(self) -> bool:
        """Says whether nothing is under way, letting it advance."""
        if self.active:
            self.advance()
        return not self.active

    def count_call(self) -> None:
        """Counts a call of this group, which all its ranks make in one order."""
        self.num_calls = self.watch.count(self._event())

    def need(self, rank: int) -> Need:
        """Returns the need that `rank` makes as many calls as this rank has made."""
        return Need(rank, self._event(), self.num_calls)

    def _event(self) -> Event:
        return "called", -1, GROUP_CHANNEL, self.tag

    def waiting(self) -> tuple[str, tuple[Need, ...]]:
        """Says in words and for the deadlock detector what is missing."""
        needs = tuple(self.need(rank) for rank in self.ranks if rank != self.transport.rank)
        return f"for an all-reduce among ranks {self.ranks}", needs


class AllReduce(Pending):
    """The sum of one tensor over the ranks of a group, in pieces."""

    def __init__(self, group: Group, tensor: Tensor) -> None:
        self.group = group
        self.tensor = tensor
        self.host = to_host(tensor)
        num_elements = max(1, PIECE_BYTES // tensor.element_size()) * len(group.ranks)
        self.pieces = [Piece(piece) for piece in torch.split(flat(self.host), num_elements)]

    def is_done(self) -> bool:
        """Says whether every piece is summed, letting the group advance."""
        if not self.pieces:
            return True
        if not self._is_summed():
            self.group.advance()
            if not self._is_summed():
                return False
        if self.host is not self.tensor:
            self.tensor.detach().copy_(self.host)
        return True

    def _is_summed(self) -> bool:
        """Says whether every piece is: a small last one, exchanged once, may overtake the second exchange of others."""
        while self.pieces and self.pieces[-1].is_finished:
            self.pieces.pop()
        return not self.pieces

    def wait(self) -> None:
        """Blocks until every piece is summed."""
        if not self.is_done():
            self.group.watch.wait_until(self.is_done, self.group.waiting)


class Piece:
    """A part of a tensor to be summed: exchanged, summed, and when it is large exchanged again."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.messages: list[Part] = []
        self.is_finished = False
        self._is_summed = False

    def exchange(self, group: Group) -> None:
        """Sends each rank what it sums, and receives what this rank sums."""
        self._group = group
        self._peers = [(i, rank) for i, rank in enumerate(group.ranks) if rank != group.transport.rank]
        is_small = self.num_bytes <= SMALL_BYTES
        num_parts = len(group.ranks)
        self._shares = [self.tensor] * num_parts if is_small else list(self.tensor.tensor_split(num_parts))
        self._mine = self._shares[group.ranks.index(group.transport.rank)]
        self._is_small = is_small
        self._parts = [self._mine] * num_parts
        for i, _ in self._peers:
            self._parts[i] = torch.empty_like(self._mine)
        self._post(self._parts, self._shares, group.tag)

    def advance(self) -> bool:
        """Takes the next step if all messages have come; says whether the later pieces may advance."""
        self.messages = [message for message in self.messages if not message.is_done()]
        if not self.messages and not self._is_summed:
            self._sum()
        elif not self.messages:
            self.is_finished = True
        return self._is_summed

    def _sum(self) -> None:
        sum_in_order(self._parts, self._mine)
        self._is_summed = True
        self._parts = []
        if self._is_small:
            self.is_finished = True
        else:
            self._post(self._shares, [self._mine] * len(self._shares), self._group.tag + 1)

    def _post(self, incoming: list[Tensor], outgoing: list[Tensor], tag: int) -> None:
        transport = self._group.transport
        for i, rank in self._peers:
            self.messages += transport.post_receives([incoming[i]], rank, GROUP_CHANNEL, tag)
        for i, rank in self._peers:
            self.messages += transport.post_sends([outgoing[i]], rank, GROUP_CHANNEL, tag)


def sum_in_order(parts: list[Tensor], out: Tensor) -> None:
    """Writes the sum of `parts`, first to last, to `out`, which is one of them; overwrites the others."""
    wide = WIDER.get(out.dtype)
    if wide is None and parts[1] is out:
        parts = [out, parts[0], *parts[2:]]
    total = parts[0] if wide is None else parts[0].to(wide)
    for part in parts[1:]:
        if total.dtype is torch.bool:
            total.logical_or_(part)
        else:
            total.add_(part)
    if total is not out:
        out.copy_(total)


def broadcast_in_tree(group: Group, tensor: Tensor, root: int) -> None:
    """Overwrites a host tensor with that of `root`: each rank that has it sends it on, in ceil(log2 n) rounds.

    Counted from the root, place p receives from p less its highest bit, and sends to p plus each higher bit.
    """
    group.count_call()
    num_ranks, start = len(group.ranks), group.ranks.index(root)
    place = (group.ranks.index(group.transport.rank) - start) % num_ranks

    def rank_at(place: int) -> int:
        return group.ranks[(place + start) % num_ranks]

    transport, tag = group.transport, group.tag + 2
    if place:
        sources = [rank_at(place & ((1 << bit) - 1)) for bit in range(place.bit_length())]
        parts = transport.post_receives([tensor], sources[-1], GROUP_CHANNEL, tag)
        finish_broadcast(group, parts, root, sources)
    targets = [
        rank_at(place + (1 << bit))
        for bit in range(place.bit_length(), num_ranks.bit_length())
        if place + (1 << bit) < num_ranks
    ]
    parts = [part for rank in targets for part in transport.post_sends([tensor], rank, GROUP_CHANNEL, tag)]
    finish_broadcast(group, parts, root, targets)


def drain(parts: list[Part]) -> bool:
    """Takes what is done out of a list, from its end; says whether nothing is left."""
    while parts and parts[-1].is_done():
        parts.pop()
    return not parts


def finish_broadcast(group: Group, parts: list[Part], root: int, ranks: list[int]) -> None:
    """Waits for the messages of a broadcast, which need `ranks` to call it."""
    words = f"for a broadcast of rank {root} among ranks {group.ranks}"
    group.watch.wait_until(partial(drain, parts), lambda: (words, tuple(group.need(rank) for rank in ranks)))
