"""Decides whether a chain of devices exists on which no load exceeds a limit: device by device, from cut to cut.

With i devices a cut is reached if it ends a chain of i devices, none above the limit. From every cut that i - 1
devices reach, and that none other beats (see `cuts`), all larger cuts are tried at once.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.cuts import Cuts
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, pack, unpack

Chain = tuple[int, ...]
_NO_CUT = -1
_ONE = np.uint64(1)
_ROUNDING = 1e-9
_FRESH = 0.9


@dataclass(frozen=True, slots=True)
class Answer:
    """What a decision found.

    Attributes:
        chain: the growing downsets at which devices end, the last one being everything; ``None`` when there is none.
        is_exact: whether the chain keeps the limit, or that there is none is proven. If not, time was over.
    """

    chain: Chain | None
    is_exact: bool


class Reach:
    """Answers for one table of cuts and many limits."""

    def __init__(self, graph: BlockGraph, cuts: Cuts, resources: Resources, num_devices: int) -> None:
        self._cuts, self._resources, self._num_devices = cuts, resources, num_devices
        wide = [net if net.bit_count() > 2 else 0 for net, _ in graph.nets]
        self._nets = [(seconds, _words_of(net, len(graph))) for net, (_, seconds) in zip(wide, graph.nets, strict=True)]

    def decide(self, load: float, may_end: Callable[[int], Bools], deadline: float = math.inf) -> Answer:
        """Looks for a chain on which no load exceeds `load`.

        Args:
            load: the limit in seconds; may be infinite.
            may_end: says for a device, from 1, which cuts may be its end; true where a chain might need it.
            deadline: when to give up, on ``time.monotonic``'s clock.
        """
        search = _Search(self._cuts, self._resources.limits(load), deadline)
        starts = np.array([0])
        for device in range(1, self._num_devices + 1):
            starts = self._next_starts(search, starts, np.flatnonzero(search.is_open & may_end(device)))
            if search.is_over or not len(starts):
                break
        return Answer(self._chain(search.came_from) if search.has_everything else None, not search.is_late)

    def _next_starts(self, search: _Search, starts: Ints, ends: Ints) -> Ints:
        """Reaches what one more device reaches, and returns the cuts at which the next one may start."""
        new = [np.zeros(0, dtype=np.int64)]
        pool = _Pool(self._cuts, ends)
        for count, start in enumerate(starts):
            found = self._ends(int(start), pool, search)
            search.reach(found, int(start))
            if search.is_over:
                break
            if len(found):
                new.append(found)
            if (count & (count + 1)) == 0:  # after 1, 2, 4, 8, ... starts
                search.drop_beaten()
            if not pool.is_fresh(search.is_open):
                pool = _Pool(self._cuts, pool.ends[search.is_open[pool.ends]])
        search.drop_beaten()
        found = np.concatenate(new)
        found = found[~search.beaten[found]]
        return found[np.lexsort((found, -self._cuts.use[0, found]))]

    def _ends(self, start: int, pool: _Pool, search: _Search) -> Ints:
        """Returns the open cuts at which a device may end that starts at `start`."""
        table, crossing = self._cuts, self._resources.crossing[:, None]
        room = search.limits[:, None]
        cuts = pool.within(start, search.limits, crossing)
        cuts = cuts[search.is_open[cuts]]
        for word, mask in enumerate(table.downsets[start]):
            if mask:
                cuts = cuts[table.downsets[cuts, word] & mask == mask]
        use = table.use[:, cuts] - table.use[:, start, None]
        fits = (use + crossing * (table.border[cuts] + table.border[start]) <= room).all(axis=0)
        unsure = np.flatnonzero(~fits)
        if len(unsure):
            cut = self._cut_seconds(start, cuts[unsure])
            fits[unsure] = (use[:, unsure] + crossing * cut <= room).all(axis=0)
        ends: Ints = cuts[fits]
        return ends

    def _cut_seconds(self, start: int, ends: Ints) -> Floats:
        """Returns the seconds of the nets that the device from `start` to each end cuts.

        These are the nets open at an end of it, but for those open at both without a block in between.
        """
        table = self._cuts
        held = (table.downsets[ends] & ~table.downsets[start]).T.copy()
        opened = table.open_nets[ends].T.copy()
        seconds: Floats = table.border[ends] + table.border[start]
        for net in bits(unpack(table.open_nets[start])):
            cost, words = self._nets[net]
            at_both = (opened[net >> 6] & _ONE << np.uint64(net & 63)) != 0
            seconds -= 2.0 * cost * at_both
            if words:
                seconds += cost * (at_both & _holds_any(held, words))
        return seconds

    def _chain(self, came_from: Ints) -> tuple[int, ...]:
        """Follows cuts back from everything to nothing."""
        cut = len(came_from) - 1
        chain = []
        while cut != 0:
            chain.append(unpack(self._cuts.downsets[cut]))
            cut = int(came_from[cut])
        return tuple(reversed(chain))


def _words_of(blocks: int, size: int) -> tuple[tuple[int, np.uint64], ...]:
    """Returns the words of a set that are not empty: (position, word)."""
    return tuple((position, word) for position, word in enumerate(pack([blocks], size)[0]) if word)


def _holds_any(sets: Words, words: tuple[tuple[int, np.uint64], ...]) -> Bools:
    """Tells which sets, shape (words, sets), hold any element of another one."""
    common = functools.reduce(operator.or_, (sets[position] & word for position, word in words))
    holds: Bools = common != 0
    return holds


class _Pool:
    """Cuts at which a device may end, by their compute seconds, with what is asked of them laid out in this order.

    Attributes:
        ends: the cuts.
    """

    def __init__(self, cuts: Cuts, ends: Ints) -> None:
        self.ends = ends[np.argsort(cuts.use[0, ends])]
        self._cuts = cuts
        self._use, self._border = cuts.use[:, self.ends], cuts.border[self.ends]

    def is_fresh(self, is_open: Bools) -> bool:
        """Tells whether not many of the cuts are closed by now."""
        return bool(is_open[self.ends].mean() > _FRESH) if len(self.ends) else True

    def within(self, start: int, limits: Floats, crossing: Floats) -> Ints:
        """Returns those that a device from `start` may reach by its blocks, and by what crosses at one end alone."""
        use, border = self._cuts.use[:, start], self._cuts.border[start]
        first = np.searchsorted(self._use[0], use[0] * (1.0 - _ROUNDING))
        last = np.searchsorted(self._use[0], (use[0] + limits[0]) * (1.0 + _ROUNDING), side="right")
        least = self._use[:, first:last] - use[:, None] + crossing * np.abs(self._border[first:last] - border)
        within = self.ends[first:last][(least <= limits[:, None]).all(axis=0)]
        further: Ints = within[within > start]
        return further


class _Search:
    """What one decision knows of each cut.

    Attributes:
        limits: of each resource of a device.
        came_from: the cut at which the last device of its chain starts, if it is reached.
        beaten: whether another cut that is reached beats it.
        is_open: whether to reach it would still help.
        is_late: whether time is over.
    """

    def __init__(self, cuts: Cuts, limits: Floats, deadline: float) -> None:
        self._cuts, self._deadline = cuts, deadline
        self.limits = limits
        self.came_from = np.full(len(cuts), _NO_CUT)
        self.came_from[0] = 0
        self.beaten = np.zeros(len(cuts), dtype=np.bool_)
        self.is_open = np.ones(len(cuts), dtype=np.bool_)
        self.is_late = False

    @property
    def has_everything(self) -> bool:
        """Whether a chain is complete."""
        return bool(self.came_from[-1] != _NO_CUT)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do, or no time to do it."""
        return self.has_everything or self.is_late

    def reach(self, ends: Ints, start: int) -> None:
        """Notes that a device from `start` ends at each of `ends`."""
        self.came_from[ends] = start
        self.is_open[ends] = False
        self.is_late = not self.has_everything and time.monotonic() > self._deadline

    def drop_beaten(self) -> None:
        """Finds the cuts that reached ones beat."""
        self.beaten = self._cuts.beaten(self.came_from != _NO_CUT)
        self.is_open &= ~self.beaten
