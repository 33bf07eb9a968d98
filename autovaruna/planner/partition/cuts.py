"""Lays downsets of a graph out in one table, as the cuts between devices, and says which cuts beat which.

A cut D, with some number of devices before it, can be completed if the blocks outside D can be split over the devices
left. Write c(D) for the seconds of the nets open at D. Take a block v that may join D next.

Rule "further". If ``seconds(v) + c(D) >= c(D + v)`` (border "overlapped": if ``c(D) >= c(D + v)``), then D + v can be
completed on any number of devices on which D can. For take the split of what is outside D, and v from its device. All
other devices hold what they held. That device loses v. The nets that v opens, which have no block in D, may become
cut there. The nets that v closes, which have blocks in D and none outside D + v but v, were cut there and are not any
more. All other nets with v have a block in D and were cut there before. So no load grows; downsets stay downsets, and
memory is only freed.

So of the cuts that so many devices reach, only those from which no step of the rule leads to another one matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.clock import check_time
from autovaruna.planner.partition.lattice import Level
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, byte_sums, pack, weigh

_ROUNDING = 1e-15


class Cuts:
    """Downsets by size, from the empty one to everything.

    Attributes:
        downsets: shape (cuts, words of blocks).
        open_nets: the nets with blocks on both sides, shape (cuts, words of nets).
        border: seconds of these nets, shape (cuts,).
        use: what the blocks of a downset use of each resource, shape (resources, cuts).
    """

    def __init__(self, downsets: Words, open_nets: Words, border: Floats, resources: Resources) -> None:
        words = downsets.shape[1]
        self.downsets, self.open_nets, self.border = downsets, open_nets, border
        self.use: Floats = np.array([weigh(downsets, byte_sums(list(row), words)) for row in resources.use])
        self._steps: list[tuple[Ints, Ints]] = []

    @staticmethod
    def of_levels(levels: list[Level], resources: Resources, deadline: float = math.inf) -> Cuts:
        """Takes all downsets of a graph.

        Raises:
            TimeoutError: it is later than `deadline`, on ``time.monotonic``'s clock.
        """
        cuts = Cuts(
            np.concatenate([level.downsets for level in levels]),
            np.concatenate([level.open_nets for level in levels]),
            np.concatenate([level.border for level in levels]),
            resources,
        )
        for step in _steps_between(levels):
            cuts._steps.append(cuts._further(resources, *step))
            check_time(deadline)
        return cuts

    @staticmethod
    def of_list(
        graph: BlockGraph, downsets: Words, resources: Resources, deadline: float = math.inf
    ) -> tuple[Cuts, Ints]:
        """Takes some downsets, and adds the empty one and everything; returns as well which cut each downset became.

        Raises:
            TimeoutError: it is later than `deadline`, on ``time.monotonic``'s clock.
        """
        ends = pack([0, (1 << len(graph)) - 1], len(graph))
        downsets, which = _unlike(graph, np.concatenate([downsets, ends]))
        sizes = weigh(downsets, byte_sums([1.0] * len(graph), downsets.shape[1]))
        order = np.argsort(sizes, kind="stable")
        downsets, sizes = downsets[order], sizes[order]
        open_nets, border = _open_nets(graph, downsets)
        cuts = Cuts(downsets, open_nets, border, resources)
        source, target, block = _steps_within(graph, downsets, deadline)
        first = np.searchsorted(sizes[source], np.unique(sizes[source]))
        cuts._steps = [
            cuts._further(resources, *step)
            for step in zip(*(np.split(part, first[1:]) for part in (source, target, block)), strict=True)
        ]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return cuts, place[which[:-2]]

    def __len__(self) -> int:
        return len(self.border)

    def beaten(self, reached: Bools) -> Bools:
        """Tells which cuts lead, by steps of rule "further", to another one that is reached."""
        beaten = np.zeros(len(self), dtype=np.bool_)
        good = reached.copy()
        for source, target in reversed(self._steps):
            leads = source[good[target]]
            beaten[leads] = good[leads] = True
        return beaten

    def _further(self, resources: Resources, source: Ints, target: Ints, block: Ints) -> tuple[Ints, Ints]:
        """Picks, of the steps that add one block, those of the rule."""
        rounding = _ROUNDING * resources.use.sum(axis=1)
        grows = self.border[target] - self.border[source]
        freed = resources.use[:, block] - resources.crossing[:, None] * grows
        is_further = (freed >= -rounding[:, None]).all(axis=0)
        return source[is_further], target[is_further]


def _steps_between(levels: list[Level]) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yields the steps from each level to the next: (cut, cut after it, block that joins)."""
    begin = 0
    for level in levels[:-1]:
        size = len(level.downsets)
        source = np.repeat(np.arange(begin, begin + size), np.diff(level.first))
        begin += size
        yield source, level.target + begin, level.block


def _steps_within(graph: BlockGraph, downsets: Words, deadline: float) -> tuple[Ints, Ints, Ints]:
    """Finds the steps between listed downsets, those of small ones first: (cut, cut after it, block that joins)."""
    size, rows = len(graph), len(downsets)
    keys_of, keys = _keys(graph, downsets)
    order = np.argsort(keys)
    ordered = keys[order]
    before = [0] * size
    for a, b in graph.edges:
        before[b] |= 1 << a
    needs = pack(before, size)
    steps: list[tuple[Ints, Ints, Ints]] = []
    for block in range(size):
        check_time(deadline)
        is_ready = ((downsets & needs[block]) == needs[block]).all(axis=1)
        source = np.flatnonzero(is_ready & ~_holds(downsets, block))
        wanted = keys[source] ^ keys_of[block]
        target = order[np.minimum(np.searchsorted(ordered, wanted), rows - 1)]
        is_there = keys[target] == wanted
        source, target = source[is_there], target[is_there]
        steps.append((source, target, np.full(len(source), block)))
    source, target, block_of = (np.concatenate([step[part] for step in steps]) for part in range(3))
    by_source = np.argsort(source, kind="stable")
    source, target, block_of = source[by_source], target[by_source], block_of[by_source]
    grown = downsets[source] | pack([1 << block for block in range(size)], size)[block_of]
    assert np.array_equal(grown, downsets[target]), "two downsets share a key"
    return source, target, block_of


def _keys(graph: BlockGraph, downsets: Words) -> tuple[Words, Words]:
    """Returns a random key of each block, and of each downset, which joins those of its blocks."""
    keys_of = np.random.default_rng(0).integers(0, 2**64, len(graph), dtype=np.uint64)
    keys = np.zeros(len(downsets), dtype=np.uint64)
    for block, key in enumerate(keys_of):
        keys ^= key * _holds(downsets, block)
    return keys_of, keys


def _unlike(graph: BlockGraph, downsets: Words) -> tuple[Words, Ints]:
    """Returns the downsets without repetitions, and which of these each one is."""
    _, one, which = np.unique(_keys(graph, downsets)[1], return_index=True, return_inverse=True)
    assert np.array_equal(downsets[one][which], downsets), "two downsets share a key"
    return downsets[one], which


def _holds(downsets: Words, block: int) -> Bools:
    held: Bools = (downsets[:, block >> 6] >> np.uint64(block & 63) & np.uint64(1)) != 0
    return held


def _open_nets(graph: BlockGraph, downsets: Words) -> tuple[Words, Floats]:
    """Returns the nets open at each downset, and their seconds."""
    open_nets = np.zeros((len(downsets), max(1, -(-len(graph.nets) // 64))), dtype=np.uint64)
    border = np.zeros(len(downsets))
    for position, (net, seconds) in enumerate(graph.nets):
        is_open = is_open_at(downsets, pack([net], len(graph))[0])
        open_nets[:, position >> 6] |= is_open.astype(np.uint64) << np.uint64(position & 63)
        border += seconds * is_open
    return open_nets, border


def is_open_at(downsets: Words, net: Words) -> Bools:
    """Tells at which downsets a net, as a row of words, has blocks on both sides."""
    some = np.zeros(len(downsets), dtype=np.bool_)
    missing = np.zeros(len(downsets), dtype=np.bool_)
    for word in np.flatnonzero(net):
        held = downsets[:, word] & net[word]
        some |= held != 0
        missing |= held != net[word]
    return some & missing
