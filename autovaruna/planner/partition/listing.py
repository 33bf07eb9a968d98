"""Lists the downsets within limits block by block.

The blocks are decided one after the other, in a topological order: a block joins the downset, or it stays outside and
so do all that follow it. What is decided so far opens some nets for good, so whatever is already too dear is dropped.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import bits
from autovaruna.planner.partition.cut_limits import CutLimits
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, byte_sums, pack, weigh

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

    @property
    def rest(self) -> float:
        """The price without the share."""
        return self.price - self.share


class States:
    """Downsets decided up to some block, one a column.

    Attributes:
        inside, outside: free blocks decided so, shape (words, states).
        used: by the blocks inside, shape (resources, states).
        left_out: by the blocks outside, shape (resources, states).
        price, share: of the nets that are open for sure, shape (states,).
        rest: price without share, shape (states,).
    """

    __slots__ = ("inside", "left_out", "outside", "price", "rest", "share", "used")

    def __init__(
        self, inside: Words, outside: Words, used: Floats, left_out: Floats, price: Floats, share: Floats, rest: Floats
    ) -> None:
        self.inside, self.outside = inside, outside
        self.used, self.left_out = used, left_out
        self.price, self.share, self.rest = price, share, rest

    def __len__(self) -> int:
        return len(self.price)

    def pick(self, index: Ints) -> States:
        """Returns some of the states, copied."""
        return States(
            self.inside[:, index],
            self.outside[:, index],
            self.used[:, index],
            self.left_out[:, index],
            self.price[index],
            self.share[index],
            self.rest[index],
        )

    def open(self, net: _Net, is_new: Bools) -> None:
        """Charges a net to the states where it is new."""
        if net.price:
            self.price += net.price * is_new
        if net.share:
            self.share += net.share * is_new
        if net.rest:
            self.rest += net.rest * is_new

    @staticmethod
    def join(parts: list[States]) -> States:
        """Puts states side by side."""
        columns = [
            np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in ("inside", "outside", "used", "left_out", "price", "share", "rest")
        ]
        return States(*columns)


class Listing:
    """One listing: what is asked of its free blocks, in their order.

    Args:
        nets: The blocks of each net.
        follow: Each block, with those that follow it.
        order: The order in which blocks are decided, a topological one.
        resources: What the blocks need.
        limits: Of the downsets.
        inside: Blocks that every such downset has.
        outside: Blocks that none of them has.
    """

    def __init__(
        self,
        nets: list[int],
        follow: list[int],
        order: list[int],
        resources: Resources,
        limits: CutLimits,
        inside: int,
        outside: int,
    ) -> None:
        self._resources, self._limits, self._inside, self._outside = resources, limits, inside, outside
        settled = inside | outside
        self.free = [block for block in order if not settled >> block & 1]
        self._place = {block: position for position, block in enumerate(self.free)}
        self._use = resources.use
        self._open_price = self._open_share = 0.0
        self._nets: list[_Net] = []
        for mask, price, share in zip(nets, limits.prices, limits.shares, strict=True):
            self._add_net(mask, float(price), float(share))
        words = max(1, -(-len(self.free) // 64))
        self._sums = [byte_sums(list(row[self.free]), words) for row in self._use]
        self._follow = [self._shrink(follow[block]) for block in self.free]
        self._nets_in, self._nets_out = self._nets_to_watch()
        self._low_before = self._lows([net.share for net in self._nets])
        self._low_after = self._lows([net.rest for net in self._nets])

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

    def start(self) -> States:
        """Returns the one state in which nothing is decided."""
        words = max(1, -(-len(self.free) // 64))
        used, left_out = (self._use[:, list(bits(mask))].sum(axis=1)[:, None] for mask in (self._inside, self._outside))
        nothing = np.zeros((words, 1), dtype=np.uint64)
        price, share = np.array([self._open_price]), np.array([self._open_share])
        state = States(nothing, nothing, used, left_out, price, share, price - share)
        return state.pick(np.flatnonzero(self._keeps(state, 0)))

    def decide(self, states: States, position: int) -> States:
        """Decides one free block in all ways."""
        word, bit = position >> 6, np.uint64(1 << (position & 63))
        is_out = (states.outside[word] & bit) != 0
        free = np.flatnonzero(~is_out)
        parts = [
            states.pick(np.flatnonzero(is_out)),
            self._put_in(states.pick(free), position),
            self._leave_out(states.pick(free), position),
        ]
        return States.join([part.pick(np.flatnonzero(self._keeps(part, position + 1))) for part in parts])

    def what_matters(self, states: States, position: int) -> Words:
        """Returns what may happen to states depends on, their blocks before `position` being decided, one a column."""
        ahead = pack([(1 << len(self.free)) - (1 << position)], len(self.free))[0]
        rows = [states.outside[word] & part for word, part in enumerate(ahead) if part]
        flags = [
            _hits(side, net.mask)
            for net in self._nets
            if net.free >> position
            for side, is_known in ((states.inside, net.is_inside), (states.outside, net.is_outside))
            if not is_known
        ]
        for begin in range(0, len(flags), 64):
            row = np.zeros(len(states), dtype=np.uint64)
            for bit, flag in enumerate(flags[begin : begin + 64]):
                row |= flag.astype(np.uint64) << np.uint64(bit)
            rows.append(row)
        return np.array(rows, dtype=np.uint64).reshape(len(rows), len(states))

    def decided_seconds(self, states: States) -> Floats:
        """Returns the compute seconds of all blocks inside and outside of states."""
        settled = float(self._use[0, list(bits(self._inside | self._outside))].sum())
        return settled + weigh((states.inside | states.outside).T, self._sums[0])

    def _put_in(self, states: States, position: int) -> States:
        for net in self._nets_in[position]:
            is_new = ~_hits(states.inside, net.mask)
            if not net.is_outside:
                is_new &= _hits(states.outside, net.mask)
            states.open(net, is_new)
        states.inside[position >> 6] |= np.uint64(1 << (position & 63))
        states.used += self._use[:, self.free[position], None]
        return states

    def _leave_out(self, states: States, position: int) -> States:
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

    def _keeps(self, states: States, position: int) -> Bools:
        """Tells which states may still become a downset within the limits."""
        before = states.share + self._low_before[position]
        after = states.rest + self._low_after[position]
        return self._limits.may_keep(states.used, states.left_out, states.price, before, after, self._resources)


def _parts(mask: int, size: int) -> _Mask:
    return tuple((position, word) for position, word in enumerate(pack([mask], size)[0]) if word)


def _hits(sets: Words, mask: _Mask) -> Bools:
    """Tells which sets, shape (words, sets), hold any element of a mask."""
    word, part = mask[0]
    found: Bools = (sets[word] & part) != 0
    for word, part in mask[1:]:
        found |= (sets[word] & part) != 0
    return found
