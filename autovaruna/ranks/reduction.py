"""Defines the sums and copies among a group of ranks, made of messages.

A sum has one order, that of `ranks`, and each element is summed on one rank (or, for small tensors, in the same way on
each): so every rank gets the same bits, and a second run too. The trees and rings of Thakur, Rabenseifner and Gropp
("Optimization of collective communication operations in MPICH", 2005, section 4) have fewer messages, and other orders.

    small tensor   every rank sends it whole to every other, and sums                        1 message time
    large tensor   rank i of n gets the i-th n-th of it from all, sums it, sends it to all   2 (n-1)/n of its bytes
    shares         as either half of that, with a share of rank i in place of the i-th n-th
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from autovaruna.ranks.deadlock import Event, Need, RankWatch
from autovaruna.ranks.transport.base import GROUP_CHANNEL, Pending, TensorTransfer, Transport
from autovaruna.ranks.transport.layout import flat, to_host

SMALL_BYTES = 16 << 10
PIECE_BYTES = 1 << 20
BYTES_AT_ONCE, BYTES_AT_ONCE_OVER_HOSTS = 4 << 20, 16 << 20
"""Of a group: a link between hosts is to be full also while a rank computes, and looks after its messages seldom."""
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Group:
    """The sums of one tuple of ranks: their pieces go in the order started, a few at once."""

    def __init__(self, transport: Transport, watch: RankWatch, ranks: tuple[int, ...]) -> None:
        self.transport, self.watch, self.ranks = transport, watch, ranks
        self.tag = (zlib.crc32(repr(ranks).encode()) >> 4) & ~3  # a multiple of 4, alike on every rank
        self.num_calls = 0
        self._coming: deque[SumPiece] = deque()
        self.active: deque[SumPiece] = deque()
        self._num_active_bytes = 0
        self._most_bytes = BYTES_AT_ONCE_OVER_HOSTS if transport.are_apart(ranks) else BYTES_AT_ONCE

    def start(self, tensor: Tensor) -> PieceExchange:
        host, num_ranks = to_host(tensor), len(self.ranks)
        pieces = []
        for piece in torch.split(flat(host), max(1, PIECE_BYTES // tensor.element_size()) * num_ranks):
            is_small = piece.nbytes <= SMALL_BYTES
            shares = [piece] * num_ranks if is_small else piece.tensor_split(num_ranks)
            pieces.append(SumPiece(shares, sums=True, gathers=not is_small))
        return self._start(pieces, [(tensor, host)])

    def start_shares(self, shares: Sequence[Sequence[Tensor]], *, gathers: bool) -> PieceExchange:
        """Starts to sum the tensors of each rank of the group there or, if it `gathers`, to send them to the others."""
        hosts = [[(tensor, to_host(tensor)) for tensor in share] for share in shares]
        columns = [[part for _, host in share for part in _cut(host)] for share in hosts]
        own = self.ranks.index(self.transport.rank)
        landing = [pair for place, share in enumerate(hosts) if (place == own) != gathers for pair in share]
        return self._start([SumPiece(row, sums=not gathers, gathers=gathers) for row in zip_longest(*columns)], landing)

    def _start(self, pieces: Sequence[SumPiece], landing: Sequence[tuple[Tensor, Tensor]]) -> PieceExchange:
        self.count_call()
        exchange = PieceExchange(self, pieces, landing)
        self._coming.extend(pieces)
        self.advance()
        return exchange

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
        while self._coming and (not self.active or self._num_active_bytes < self._most_bytes):
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
        return f"for a sum or a copy among ranks {self.ranks}", needs


class PieceExchange(Pending):
    """A sum or a copy among the ranks of a group on its way, in pieces.

    `landing` has tensors, and the memory on the host that is copied to them at the end.
    """

    def __init__(self, group: Group, pieces: Sequence[SumPiece], landing: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._group, self._pieces = group, list(pieces)
        self._landing = [pair for pair in landing if pair[0] is not pair[1]]

    def is_done(self) -> bool:
        if not self._has_ended():
            self._group.advance()
            if not self._has_ended():
                return False
        landing, self._landing = self._landing, []
        for tensor, host in landing:
            tensor.detach().copy_(host)
        return True

    def _has_ended(self) -> bool:
        """Says whether every piece has ended: one that is exchanged once may overtake the second exchange of others."""
        while self._pieces and self._pieces[-1].is_finished:
            self._pieces.pop()
        return not self._pieces

    def wait(self) -> None:
        if not self.is_done():
            self._group.watch.wait_until(self.is_done, self._group.waiting)


class SumPiece:
    """One piece of what is exchanged, of which each rank of the group has a share, or none.

    If it `sums`, each share is summed on its rank; if it `gathers`, it is sent from there to the others then.
    """

    def __init__(self, shares: Sequence[Tensor | None], *, sums: bool, gathers: bool) -> None:
        self._shares, self._sums, self._gathers = shares, sums, gathers
        self._parts: list[Tensor] = []
        self._messages: list[TensorTransfer] = []
        self.num_bytes = sum(share.nbytes for share in shares if share is not None)
        self.is_finished = False

    def exchange(self, group: Group) -> None:
        """Sends each rank what it gets of this one, and receives what this rank gets."""
        self._group, self._own = group, group.ranks.index(group.transport.rank)
        mine, num_ranks = self._shares[self._own], len(self._shares)
        if not self._sums:
            self._post(self._shares, [mine] * num_ranks, group.tag)
            return
        if mine is not None:
            self._parts = [mine if place == self._own else torch.empty_like(mine) for place in range(num_ranks)]
        self._post(self._parts or [None] * num_ranks, self._shares, group.tag)

    def advance(self) -> bool:
        """Takes the next step if all messages have come; says whether the later pieces may advance."""
        self._messages = [message for message in self._messages if not message.is_done()]
        if not self._messages and self._sums:
            self._sum()
        elif not self._messages:
            self.is_finished = True
        return not (self._sums and self._gathers)

    def _sum(self) -> None:
        mine, self._sums = self._shares[self._own], False
        if mine is not None:
            sum_in_order(self._parts, mine)
        self._parts = []
        if self._gathers:
            self._post(self._shares, [mine] * len(self._shares), self._group.tag + 1)
        else:
            self.is_finished = True

    def _post(self, incoming: Sequence[Tensor | None], outgoing: Sequence[Tensor | None], tag: int) -> None:
        transport = self._group.transport
        peers = [(place, rank) for place, rank in enumerate(self._group.ranks) if place != self._own]
        for tensors, post in ((incoming, transport.post_receives), (outgoing, transport.post_sends)):
            for place, rank in peers:
                if (tensor := tensors[place]) is not None:
                    self._messages += post([tensor], rank, GROUP_CHANNEL, tag)


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    """Cuts a tensor into flat pieces; none of no elements."""
    return torch.split(flat(tensor), max(1, PIECE_BYTES // tensor.element_size())) if tensor.numel() else ()


def sum_in_order(parts: list[Tensor], out: Tensor) -> None:
    """Writes the sum of `parts`, first to last, to `out`, which is one of them; overwrites the others."""
    wide = WIDER.get(out.dtype)
    if wide is None and parts[1] is out:
        parts = [out, parts[0], *parts[2:]]
    total = parts[0] if wide is None else parts[0].to(wide)
    for part in parts[1:]:
        total = total.logical_or_(part) if total.dtype is torch.bool else total.add_(part)
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

    def finish(parts: list[TensorTransfer], ranks: list[int]) -> None:
        words = f"for a broadcast of rank {root} among ranks {group.ranks}"
        group.watch.wait_until(partial(drain, parts), lambda: (words, tuple(map(group.need, ranks))))

    transport, tag = group.transport, group.tag + 2
    if place:
        sources = [rank_at(place & ((1 << bit) - 1)) for bit in range(place.bit_length())]
        parts = transport.post_receives([tensor], sources[-1], GROUP_CHANNEL, tag)
        finish(parts, sources)
    later = [place + (1 << bit) for bit in range(place.bit_length(), num_ranks.bit_length())]
    targets = [rank_at(each) for each in later if each < num_ranks]
    finish([part for rank in targets for part in transport.post_sends([tensor], rank, GROUP_CHANNEL, tag)], targets)


def drain(parts: list[TensorTransfer]) -> bool:
    """Takes what is done out of a list, from its end; says whether nothing is left."""
    while parts and parts[-1].is_done():
        parts.pop()
    return not parts
