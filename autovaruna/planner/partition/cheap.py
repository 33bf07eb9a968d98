"""Lists the downsets at which little crosses, without listing the others.

The blocks are decided one after the other, in a topological order: a block joins the downset, or it stays outside and
so do all that follow it. What is decided so far opens some nets for good, so whatever is already too dear is dropped.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.contract import closures
from autovaruna.planner.partition.cut_limits import CutLimits, CutList
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, byte_sums, pack, weigh

_ROUNDING = 1e-9
_ROWS_AT_ONCE = 1 << 15
_Mask = tuple[tuple[int, np.uint64], ...]


@dataclass(frozen=True, slots=True)
class _Net:
    """A net among the blocks that are still free: whether other blocks of it are inside, or outside, for sure."""

    free: int
    mask: _Mask
    is_inside: bool
    is_outside: bool
    price: float
    share: float


class _States:
    """Downsets decided up to some block, one a column.

    Attributes:
        inside, outside: free blocks decided so, shape (words, states).
        used: by the blocks inside, shape (resources, states).
        left_out: by the blocks outside, shape (resources, states).
        price, share: of the nets that are open for sure, shape (states,).
    """

    __slots__ = ("inside", "left_out", "outside", "price", "share", "used")

    def __init__(
        self, inside: Words, outside: Words, used: Floats, left_out: Floats, price: Floats, share: Floats
    ) -> None:
        self.inside, self.outside = inside, outside
        self.used, self.left_out = used, left_out
        self.price, self.share = price, share

    def __len__(self) -> int:
        return len(self.price)

    def pick(self, index: Ints) -> _States:
        """Returns some of the states, copied."""
        return _States(
            self.inside[:, index],
            self.outside[:, index],
            self.used[:, index],
            self.left_out[:, index],
            self.price[index],
            self.share[index],
        )

    def open(self, net: _Net, is_new: Bools) -> None:
        """Charges a net to the states where it is new."""
        if net.price:
            self.price += net.price * is_new
        if net.share:
            self.share += net.share * is_new

    @staticmethod
    def join(parts: list[_States]) -> _States:
        """Puts states side by side."""
        columns = [
            np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in ("inside", "outside", "used", "left_out", "price", "share")
        ]
        return _States(*columns)


class CheapCuts:
    """Lists cheap downsets of one graph, again and again."""

    def __init__(self, graph: BlockGraph, resources: Resources) -> None:
        ancestors, descendants = closures(graph)
        self._size, self._nets = len(graph), [net for net, _ in graph.nets]
        self._resources = resources
        self._upto = [mask | 1 << block for block, mask in enumerate(ancestors)]
        self._from = [mask | 1 << block for block, mask in enumerate(descendants)]
        self._use_upto, self._use_from = (
            np.array([resources.use[:, list(bits(mask))].sum(axis=1) for mask in masks]).reshape(self._size, -1)
            for masks in (self._upto, self._from)
        )

    def settled(self, limits: CutLimits) -> tuple[int, int]:
        """Returns the blocks that are inside, and those that are outside, of every downset within the limits."""
        crossing = self._resources.crossing
        low_before = np.minimum(limits.shares, 0.0).sum()
        low_after = np.minimum(limits.prices - limits.shares, 0.0).sum()
        most_before = np.minimum(limits.before - crossing * low_before, limits.most_before)
        most_after = np.minimum(limits.after - crossing * low_after, limits.most_after)
        wide = _ROUNDING * self._resources.use.sum(axis=1)
        inside = np.flatnonzero((self._use_from > most_after + wide).any(axis=1))
        outside = np.flatnonzero((self._use_upto > most_before + wide).any(axis=1))
        return sum(1 << int(b) for b in inside), sum(1 << int(b) for b in outside)

    def within(self, limits: CutLimits, most: int, deadline: float = math.inf) -> CutList | None:
        """Lists all downsets within limits; ``None`` if more than `most` are under way at once, or time is over."""
        cuts, is_complete = self.cheapest(limits, most, deadline, may_drop=False)
        return cuts if is_complete else None

    def cheapest(
        self, limits: CutLimits, most: int, deadline: float = math.inf, *, may_drop: bool = True
    ) -> tuple[CutList, bool]:
        """Lists downsets within limits, dropping the dearest under way when they are more than `most`.

        Returns:
            The downsets, and whether these are all. None at all if time is over, or if dropping is not allowed.
        """
        inside, outside = self.settled(limits)
        if inside & outside:
            return self.nothing(), True
        listing = _Listing(self, limits, inside, outside)
        states, is_complete = listing.start(), True
        for position in range(len(listing.free)):
            states = listing.decide(states, position)
            if len(states) > most:
                is_complete = False
                states = states.pick(np.argpartition(states.price, most)[:most])
            if time.monotonic() > deadline or not (is_complete or may_drop):
                return self.nothing(), False
            if not len(states):
                break
        return self._finish(states, listing.free, inside), is_complete

    def nothing(self) -> CutList:
        """Returns a list without downsets."""
        empty = np.zeros(0)
        return CutList(pack([], self._size), self._resources.use[:, :0], empty, empty)

    def _finish(self, states: _States, free: list[int], inside: int) -> CutList:
        """Writes downsets of free blocks as downsets of all blocks."""
        if not len(states):
            return self.nothing()
        first = pack([inside], self._size)
        num_words = first.shape[1]
        parts = []
        for begin in range(0, len(states), _ROWS_AT_ONCE):
            rows = np.ascontiguousarray(states.inside[:, begin : begin + _ROWS_AT_ONCE].T)
            held = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")[:, : len(free)]
            wide = np.zeros((len(rows), 64 * num_words), dtype=np.uint8)
            wide[:, free] = held
            parts.append(np.packbits(wide, axis=1, bitorder="little").view(np.uint64) | first)
        return CutList(np.concatenate(parts), states.used, states.price, states.share)


class _Listing:
    """One listing: what is asked of its free blocks, in their order."""

    def __init__(self, cuts: CheapCuts, limits: CutLimits, inside: int, outside: int) -> None:
        self._cuts, self._limits, self._inside, self._outside = cuts, limits, inside, outside
        settled = inside | outside
        self.free = [block for block in range(cuts._size) if not settled >> block & 1]
        self._place = {block: position for position, block in enumerate(self.free)}
        self._use = cuts._resources.use
        self._open_price = self._open_share = 0.0
        self._nets: list[_Net] = []
        for mask, price, share in zip(cuts._nets, limits.prices, limits.shares, strict=True):
            self._add_net(mask, float(price), float(share))
        words = max(1, -(-len(self.free) // 64))
        self._sums = [byte_sums(list(row[self.free]), words) for row in self._use]
        self._follow = [self._shrink(cuts._from[block]) for block in self.free]
        self._nets_in, self._nets_out = self._nets_to_watch()
        self._low_before = self._lows([net.share for net in self._nets])
        self._low_after = self._lows([net.price - net.share for net in self._nets])

    def _add_net(self, mask: int, price: float, share: float) -> None:
        is_inside, is_outside = bool(mask & self._inside), bool(mask & self._outside)
        if is_inside and is_outside:
            self._open_price += price
            self._open_share += share
        elif (price or share) and (free := self._shrink(mask)):
            self._nets.append(_Net(free, _parts(free, len(self.free)), is_inside, is_outside, price, share))

    def _shrink(self, mask: int) -> int:
        """Renumbers a set of blocks by the places of the free ones, without the others."""
        return sum(1 << self._place[block] for block in bits(mask & ~(self._inside | self._outside)))

    def _nets_to_watch(self) -> tuple[list[list[_Net]], list[list[_Net]]]:
        """Lists for each free block the nets that may open when it goes inside, and when it stays outside."""
        goes_in: list[list[_Net]] = [[] for _ in self.free]
        stays_out: list[list[_Net]] = [[] for _ in self.free]
        for net in self._nets:
            first = (net.free & -net.free).bit_length() - 1
            if not net.is_inside:
                for position in bits(net.free):
                    goes_in[position].append(net)
            if not net.is_outside:
                for position in range(0 if net.is_inside else first + 1, net.free.bit_length()):
                    if self._follow[position] & net.free:
                        stays_out[position].append(net)
        return goes_in, stays_out

    def _lows(self, figures: list[float]) -> list[float]:
        """Returns, for each place, the least that nets may still add which have a block there or later."""
        lows = [0.0] * (len(self.free) + 1)
        for net, figure in zip(self._nets, figures, strict=True):
            lows[net.free.bit_length() - 1] += min(figure, 0.0)
        return list(itertools.accumulate(reversed(lows)))[::-1]

    def start(self) -> _States:
        """Returns the one state in which nothing is decided."""
        words = max(1, -(-len(self.free) // 64))
        used, left_out = (self._use[:, list(bits(mask))].sum(axis=1)[:, None] for mask in (self._inside, self._outside))
        nothing = np.zeros((words, 1), dtype=np.uint64)
        state = _States(nothing, nothing, used, left_out, np.array([self._open_price]), np.array([self._open_share]))
        return state.pick(np.flatnonzero(self._keeps(state, 0)))

    def decide(self, states: _States, position: int) -> _States:
        """Decides one free block in all ways."""
        word, bit = position >> 6, np.uint64(1 << (position & 63))
        is_out = (states.outside[word] & bit) != 0
        free = np.flatnonzero(~is_out)
        parts = [
            states.pick(np.flatnonzero(is_out)),
            self._put_in(states.pick(free), position),
            self._leave_out(states.pick(free), position),
        ]
        return _States.join([part.pick(np.flatnonzero(self._keeps(part, position + 1))) for part in parts])

    def _put_in(self, states: _States, position: int) -> _States:
        for net in self._nets_in[position]:
            is_new = ~_hits(states.inside, net.mask)
            if not net.is_outside:
                is_new &= _hits(states.outside, net.mask)
            states.open(net, is_new)
        states.inside[position >> 6] |= np.uint64(1 << (position & 63))
        states.used += self._use[:, self.free[position], None]
        return states

    def _leave_out(self, states: _States, position: int) -> _States:
        for net in self._nets_out[position]:
            is_new = ~_hits(states.outside, net.mask)
            if not net.is_inside:
                is_new &= _hits(states.inside, net.mask)
            states.open(net, is_new)
        follow = pack([self._follow[position]], len(self.free))[0][:, None]
        is_new = (follow & ~states.outside).T
        for left_out, sums in zip(states.left_out, self._sums, strict=True):
            left_out += weigh(is_new, sums)
        states.outside |= follow
        return states

    def _keeps(self, states: _States, position: int) -> Bools:
        """Tells which states may still become a downset within the limits."""
        before = states.share + self._low_before[position]
        after = states.price - states.share + self._low_after[position]
        resources = self._cuts._resources
        return self._limits.may_keep(states.used, states.left_out, states.price, before, after, resources)


def _parts(mask: int, size: int) -> _Mask:
    return tuple((position, word) for position, word in enumerate(pack([mask], size)[0]) if word)


def _hits(sets: Words, mask: _Mask) -> Bools:
    """Tells which sets, shape (words, sets), hold any element of a mask."""
    word, part = mask[0]
    found: Bools = (sets[word] & part) != 0
    for word, part in mask[1:]:
        found |= (sets[word] & part) != 0
    return found
