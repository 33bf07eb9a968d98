"""Lists all downsets of a block graph and the steps between them, one size at a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, expand, flatten, has, pack

_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Level:
    """The downsets of one size, and the steps that add one block to them.

    Attributes:
        downsets: shape (downsets, words of blocks).
        open_nets: the nets with blocks inside and outside, shape (downsets, words of nets).
        border: seconds of these nets, shape (downsets,).
        first: steps ``first[d] ... first[d + 1] - 1`` start at downset d, shape (downsets + 1,).
        block: the block each step adds, shape (steps,).
        target: the downset in the next level where it ends, shape (steps,).
    """

    downsets: Words
    open_nets: Words
    border: Floats
    first: Ints
    block: Ints
    target: Ints


def count(levels: list[Level]) -> int:
    """Counts the downsets of all levels."""
    return sum(len(level.downsets) for level in levels)


class _Tables:
    """What a lister looks up for each block."""

    def __init__(self, graph: BlockGraph) -> None:
        size, nets = len(graph), [net for net, _ in graph.nets]
        self.net_seconds = np.array([seconds for _, seconds in graph.nets], dtype=np.float64)
        self.net_words = max(1, -(-len(nets) // 64))
        self.net_blocks = pack(nets, size)
        nets_of: list[list[int]] = [[] for _ in range(size)]
        for position, net in enumerate(nets):
            for block in bits(net):
                nets_of[block].append(position)
        self.nets_first, self.nets = flatten(nets_of)
        self.nets_mask = pack([sum(1 << net for net in of) for of in nets_of], len(nets))
        next_to: list[list[int]] = [[] for _ in range(size)]
        needs = [0] * size
        for a, b in graph.edges:
            next_to[a].append(b)
            needs[b] |= 1 << a
        self.next_first, self.next_to = flatten(next_to)
        self.needs = pack(needs, size)
        self.own = pack([1 << block for block in range(size)], size)
        self.keys = np.random.default_rng(0).integers(0, 2**64, size, dtype=np.uint64)
        self.sources = pack([sum(1 << block for block in range(size) if not needs[block])], size)


def list_downsets(graph: BlockGraph, limit: int, deadline: float = math.inf) -> list[Level] | None:
    """Lists the downsets level by level.

    Args:
        graph: the blocks.
        limit: how many downsets are too many.
        deadline: when to give up, on ``time.monotonic``'s clock.

    Returns:
        The levels, from the empty downset up; ``None`` if there are too many, they would take too much memory, or time
        was over.
    """
    tables = _Tables(graph)
    downsets = np.zeros((1, tables.own.shape[1]), dtype=np.uint64)
    ready, keys = tables.sources, np.zeros(1, dtype=np.uint64)
    open_nets, border = np.zeros((1, tables.net_words), dtype=np.uint64), np.zeros(1)
    levels: list[Level] = []
    total, num_bytes = 1, 0
    for _ in range(len(graph)):
        source, block = _steps(ready, len(graph))
        first = np.searchsorted(source, np.arange(len(downsets) + 1))
        target_keys = keys[source] ^ tables.keys[block]
        keys, one, target = np.unique(target_keys, return_index=True, return_inverse=True)
        levels.append(Level(downsets, open_nets, border, first, block, target))
        total += len(keys)
        num_bytes += sum(part.nbytes for part in (downsets, open_nets, border, first, block, target))
        if total > limit or num_bytes > _MOST_BYTES or time.monotonic() > deadline:
            return None
        grown = downsets[source] | tables.own[block]
        assert np.array_equal(grown[one][target], grown), "two downsets share a key"
        source, block = source[one], block[one]
        open_nets, border = _cross(tables, open_nets, border, source, block, grown[one])
        ready = _extend(tables, ready[source] & ~tables.own[block], block, grown[one])
        downsets = grown[one]
    nothing = np.zeros(0, dtype=np.int64)
    levels.append(Level(downsets, open_nets, border, np.zeros(len(downsets) + 1, dtype=np.int64), nothing, nothing))
    return levels


def _steps(ready: Words, size: int) -> tuple[Ints, Ints]:
    """Returns (downset, block) for every block that is ready to join a downset, in the order of downsets."""
    ones = np.unpackbits(ready.view(np.uint8), axis=1, bitorder="little")[:, :size]
    source, block = np.nonzero(ones)
    return source, block


def _extend(tables: _Tables, ready: Words, block: Ints, downsets: Words) -> Words:
    """Adds the blocks that became ready when `block` joined."""
    row, position = expand(tables.next_first[block], np.diff(tables.next_first)[block])
    follower = tables.next_to[position]
    needs = tables.needs[follower]
    is_ready = ((downsets[row] & needs) == needs).all(axis=1)
    row, follower = row[is_ready], follower[is_ready]
    np.bitwise_or.at(ready, (row, follower >> 6), np.left_shift(np.uint64(1), (follower & 63).astype(np.uint64)))
    return ready


def _cross(
    tables: _Tables, open_nets: Words, border: Floats, source: Ints, block: Ints, after: Words
) -> tuple[Words, Floats]:
    """Updates the open nets, and their seconds, when `block` joins downset `source`."""
    row, position = expand(tables.nets_first[block], np.diff(tables.nets_first)[block])
    net = tables.nets[position]
    was_open = has(open_nets, source[row], net)
    is_open = ~_contains(after, row, tables.net_blocks[net])
    change = tables.net_seconds[net] * (is_open.astype(np.int64) - was_open)
    seconds = border[source] + np.bincount(row, change, len(block))
    opened = open_nets[source] | tables.nets_mask[block]
    row, net = row[~is_open], net[~is_open]
    closed = np.zeros_like(opened)
    np.bitwise_or.at(closed, (row, net >> 6), np.left_shift(np.uint64(1), (net & 63).astype(np.uint64)))
    return opened & ~closed, seconds


def _contains(rows: Words, index: Ints, sets: Words) -> Bools:
    inside: Bools = ((rows[index] & sets) == sets).all(axis=1)
    return inside
