"""Holds profile and graph as arrays: what blocks cost (`CostTable`), where values go (`Flow`), what ranges of segments
have (`RangeTables`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autovaruna.graph.records import Graph, Parameter, Size, Value
from autovaruna.profiler.records import Profile

Array = NDArray[np.float64]
_Holders = Sequence[Sequence[int]]
"""For each thing, the segments in which it is used, ascending; the first one makes it."""
_SIGNS = np.array([1.0, -1.0, -1.0, 1.0])


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each block at one micro-batch size; every array has one entry a block."""

    micro_batch_size: float
    forward_seconds: Array
    backward_seconds: Array
    saved_bytes: Array
    work_bytes: Array


class CostTable:
    """The costs of a profile as arrays, to be read at any micro-batch size.

    Two rules keep noise out: a larger micro-batch never costs less than a smaller one, and below the smallest
    measured size a cost falls no faster than in proportion.
    """

    def __init__(self, profile: Profile) -> None:
        sizes = np.array(profile.micro_batch_sizes, dtype=np.float64)
        order = np.argsort(sizes)
        self._sizes = sizes[order]
        names = [each.name for each in fields(Costs)[1:]]
        rows = (np.array([[getattr(cost, name) for cost in costs] for costs in profile.costs]) for name in names)
        self._rows = [np.maximum.accumulate(row.astype(np.float64)[order], axis=0) for row in rows]
        self.at = lru_cache(maxsize=16)(self._at)  # a search asks for the same few sizes

    def _at(self, micro_batch_size: float) -> Costs:
        return Costs(micro_batch_size, *(_interpolate(rows, self._sizes, micro_batch_size) for rows in self._rows))


def _interpolate(rows: Array, sizes: Array, size: float) -> Array:
    """Returns the row at `size`, between the measured sizes or from the two nearest, by a line.

    `rows` is ``(len(sizes), num_blocks)`` with ascending sizes and numbers.
    """
    if len(sizes) == 1:
        return np.asarray(rows[0] * (size / sizes[0]), dtype=np.float64)
    right = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    share = float((size - sizes[right - 1]) / (sizes[right] - sizes[right - 1]))
    row = rows[right - 1] + share * (rows[right] - rows[right - 1])
    if size < sizes[0]:
        row = np.maximum(row, rows[0] * (size / sizes[0]))
    return np.asarray(row, dtype=np.float64)


class Flow:
    """Where some values of a graph go; what that says of their blocks is found once, and asked for every M."""

    def __init__(self, values: Sequence[Value], num_blocks: int) -> None:
        self.values, self.num_blocks = values, num_blocks

    @cached_property
    def holders(self) -> dict[int, list[int]]:
        """By block, the earlier ones that were the last to make or use a value which it needs, ascending."""
        found: dict[int, set[int]] = {}
        for value in self.values:
            for holder, user in pairwise(sorted({value.producer, *value.consumers})):
                found.setdefault(user, set()).add(holder)
        return {user: sorted(holders) for user, holders in found.items()}

    @cached_property
    def producers(self) -> dict[int, list[int]]:
        """The blocks whose values each block uses, by block; those that use none are left out."""
        found: dict[int, list[int]] = {}
        for value in self.values:
            for user in value.consumers:
                found.setdefault(user, []).append(value.producer)
        return dict(sorted(found.items()))

    def fill_seconds(self, block_seconds: Array) -> Array:
        """Returns, for each block p, the least seconds of other stages that a stage starting at p waits for.

        Args:
            block_seconds: of each block, forward (of gradients: backward; then the wait is that after the stage's last
                backward), on the fastest rank.

        Returns:
            ``(num_blocks,)``, valid for every split into consecutive stages, one stage a rank.
        """
        work = [0.0, *np.cumsum(block_seconds).tolist()]
        fill = [0.0] * self.num_blocks
        # The stage that holds block h starts at some i <= h, has waited fill[i], and works at least work[h + 1] -
        # work[i].
        slack = [0.0] * self.num_blocks
        for p in range(1, self.num_blocks):
            holder = max(self.holders.get(p, [-1]))
            fill[p] = work[holder + 1] + slack[holder] if holder >= 0 else 0.0
            slack[p] = min(slack[p - 1], fill[p] - work[p])
        return np.array(fill)

    def longest_path(self, block_seconds: Array) -> list[int]:
        """Returns the blocks of the path along the values, each block before the next, that takes longest."""
        seconds, origin = block_seconds.tolist(), [-1] * self.num_blocks
        for block, producers in self.producers.items():
            origin[block] = max(producers, key=seconds.__getitem__)
            seconds[block] += seconds[origin[block]]
        path = [max(range(len(seconds)), key=seconds.__getitem__)]
        while origin[path[-1]] >= 0:
            path.append(origin[path[-1]])
        return path[::-1]


@dataclass(frozen=True, slots=True)
class SizedTable:
    """A table of bytes that depend on the micro-batch size."""

    fixed_bytes: Array
    sample_bytes: Array

    def at(self, micro_batch_size: float, where: Any = ...) -> Array:
        """Returns the table for a micro-batch of `micro_batch_size` samples, or one entry of it."""
        return np.asarray(self.fixed_bytes[where] + self.sample_bytes[where] * micro_batch_size, dtype=np.float64)


class _Rectangles:
    """Rectangles of an ``(n+1, n+1)`` matrix, some for each of some things, to which the things add their weights.

    Each is a thing, its first row, the row behind the last, the first column, and the column behind the last.
    """

    def __init__(self, n: int, found: Iterable[tuple[int, int, int, int, int]]) -> None:
        self.n = n
        things, *sides = np.array(list(found), dtype=np.int64).reshape(-1, 5).T
        top, bottom, left, right = sides
        self.things = things
        self.corners = np.stack([top * (n + 2) + left, top * (n + 2) + right, bottom * (n + 2) + left,
                                 bottom * (n + 2) + right], axis=1)  # fmt: skip

    def total(self, weights: Sequence[float]) -> Array:
        each, n = np.array(weights, dtype=np.float64), self.n
        if not each.any():
            return np.zeros((n + 1, n + 1))
        differences = np.bincount(self.corners.ravel(), (each[self.things, None] * _SIGNS).ravel(), (n + 2) ** 2)
        sums = differences.reshape(n + 2, n + 2).cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
        # Weights cancel only to within rounding; bytes are never negative.
        return np.asarray(np.maximum(sums, 0.0), dtype=np.float64)

    def sized(self, sizes: Sequence[Size]) -> SizedTable:
        return SizedTable(
            self.total([size.fixed_bytes for size in sizes]), self.total([size.sample_bytes for size in sizes])
        )


class RangeTables:
    """Every table of a graph whose stages start at some positions, from 0 to the number of blocks, which is the end."""

    def __init__(self, graph: Graph, positions: Sequence[int]) -> None:
        self.positions = np.array(positions, dtype=np.int64)
        self.num_segments = len(positions) - 1
        starts = self.positions[1:-1]
        self.segment_of = np.searchsorted(starts, np.arange(len(graph.blocks)), side="right")
        parameters = graph.parameters
        trained = [p for p in parameters if p.needs_gradient]
        tied = [p.needs_gradient and len(p.blocks) > 1 for p in parameters]
        held = self._held(p.blocks for p in parameters)
        self.parameter_bytes = held.total([p.num_bytes for p in parameters])
        self.trained_bytes = held.total([p.num_bytes * p.needs_gradient for p in parameters])
        self.largest_bytes = self.greatest(_largest(graph, trained))
        self.gradient_bytes = gradient_bytes(graph, trained)
        self.num_trained = held.total([1.0 * p.needs_gradient for p in parameters])
        self.tied_bytes = self.add_up(gradient_bytes(graph, [p for p in trained if len(p.blocks) > 1]))
        self.tied_once_bytes = held.total([p.num_bytes * each for p, each in zip(parameters, tied, strict=True)])
        self.buffer_bytes = self.add_up(np.array([block.buffer_bytes for block in graph.blocks], dtype=np.float64))
        self.inputs = self._held(each.consumers for each in graph.inputs).sized([each.size for each in graph.inputs])
        sizes = [value.size for value in graph.values]
        of_gradients = [value.size if value.needs_gradient else Size(0.0, 0.0) for value in graph.values]
        holders = [self._segments((value.producer, *value.consumers)) for value in graph.values]
        received, sent = self._received(holders), self._sent(holders)
        self.received, self.sent = received.sized(sizes), sent.sized(sizes)
        self.gradients_received, self.gradients_sent = sent.sized(of_gradients), received.sized(of_gradients)

    def add_up(self, weights: Array) -> Array:
        """Returns the sums over ranges of one weight a block."""
        prefix = self.prefix(weights)
        return np.asarray(np.maximum(prefix[None, :] - prefix[:, None], 0.0), dtype=np.float64)

    def prefix(self, weights: Array) -> Array:
        """Returns the sum of one weight a block before each position."""
        return np.asarray(np.concatenate([[0.0], np.cumsum(weights)])[self.positions], dtype=np.float64)

    def greatest(self, weights: Array) -> Array:
        """Returns the greatest weight of a block in each range."""
        table = np.zeros((self.num_segments + 1, self.num_segments + 1))
        each = np.maximum.reduceat(weights, self.positions[:-1])
        for i in range(self.num_segments):
            table[i, i + 1 :] = np.maximum.accumulate(each[i:])
        return table

    def _segments(self, blocks: Iterable[int]) -> list[int]:
        return sorted({int(self.segment_of[block]) for block in blocks})

    def _held(self, things: Iterable[Iterable[int]]) -> _Rectangles:
        """Returns the ranges with at least one of the blocks that use each thing, as if it was made before all."""
        return self._received([[-1, *self._segments(blocks)] for blocks in things])

    def _received(self, things: _Holders) -> _Rectangles:
        """Returns the ranges before which each thing was made, and in which it is used."""
        n = self.num_segments
        pairs = ((k, before, user) for k, holders in enumerate(things) for before, user in pairwise(holders))
        return _Rectangles(n, ((k, before + 1, user + 1, user + 1, n + 1) for k, before, user in pairs))

    def _sent(self, things: _Holders) -> _Rectangles:
        """Returns the ranges that make or use each thing, and after which it is used."""
        pairs = ((k, holder, user) for k, holders in enumerate(things) for holder, user in pairwise(holders))
        return _Rectangles(self.num_segments, ((k, 0, holder + 1, holder + 1, user + 1) for k, holder, user in pairs))


def gradient_bytes(graph: Graph, trained: Iterable[Parameter]) -> Array:
    """Returns the bytes of the gradients of some parameters that each block makes; each use has one."""
    made = np.zeros(len(graph.blocks))
    for parameter in trained:
        made[list(parameter.blocks)] += parameter.num_bytes
    return made


def _largest(graph: Graph, parameters: Iterable[Parameter]) -> Array:
    largest = np.zeros(len(graph.blocks))
    for parameter in parameters:
        places = list(parameter.blocks)
        largest[places] = np.maximum(largest[places], parameter.num_bytes)
    return largest
