"""Sums over every range of a chain at once: what a stage of the segments ``i .. j-1`` holds, receives and sends.

A table is a matrix ``A[i, j]``, 0 <= i < j <= n, of sums over things that are used in several places (a tied
parameter, a value with many consumers). Each thing counts once in a range, so it adds its weight to a few rectangles
of the matrix; all of them are summed by one pass over a difference array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autovaruna.graph.records import Graph, Parameter, Size
from autovaruna.planner.costs import Array

_Things = Iterable[tuple[float, Sequence[int]]]
"""Weights, and the segments in which each is used, ascending; the first one makes it."""


@dataclass(frozen=True, slots=True)
class SizedTable:
    """A table of bytes that depend on the micro-batch size."""

    fixed_bytes: Array
    sample_bytes: Array

    def at(self, micro_batch_size: float) -> Array:
        """Returns the table for a micro-batch of `micro_batch_size` samples."""
        return np.asarray(self.fixed_bytes + self.sample_bytes * micro_batch_size, dtype=np.float64)

    def of(self, i: int, j: int, micro_batch_size: float) -> float:
        """Returns one entry of the table for a micro-batch of `micro_batch_size` samples."""
        return float(self.fixed_bytes[i, j] + self.sample_bytes[i, j] * micro_batch_size)


class _Rectangles:
    """Adds weights to rectangles of an ``(n+1, n+1)`` matrix, and sums them."""

    def __init__(self, n: int) -> None:
        self.differences, self.is_empty = np.zeros((n + 2, n + 2)), True

    def add(self, weight: float, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Adds to ``A[rows[0]:rows[1], columns[0]:columns[1]]``."""
        if not weight:
            return
        self.is_empty = False
        self.differences[rows[0], columns[0]] += weight
        self.differences[rows[0], columns[1]] -= weight
        self.differences[rows[1], columns[0]] -= weight
        self.differences[rows[1], columns[1]] += weight

    def total(self) -> Array:
        """Returns the matrix."""
        if self.is_empty:
            return self.differences[:-1, :-1]
        sums: Array = self.differences.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
        # Weights cancel only to within rounding; bytes are never negative.
        return np.maximum(sums, 0.0)


class RangeTables:
    """Every table of a graph whose cuts are restricted to some positions.

    Args:
        graph: the graph.
        positions: block indices where a segment starts, ascending, from 0, and the number of blocks at the end.
    """

    def __init__(self, graph: Graph, positions: Sequence[int]) -> None:
        self.positions = np.array(positions, dtype=np.int64)
        self.num_segments = len(positions) - 1
        starts = self.positions[1:-1]
        self.segment_of = np.searchsorted(starts, np.arange(len(graph.blocks)), side="right")
        held = [(p, self._segments(p.blocks)) for p in graph.parameters]
        trained = [(p, segments) for p, segments in held if p.needs_gradient]
        tied = [(p, segments) for p, segments in trained if len(p.blocks) > 1]
        self.parameter_bytes = self._held((p.num_bytes, segments) for p, segments in held)
        self.trained_bytes = self._held((p.num_bytes, segments) for p, segments in trained)
        self.largest_bytes = self.greatest(_largest(graph, [p for p, _ in trained]))
        self.gradient_bytes = gradient_bytes(graph)
        self.num_trained = self._held((1.0, segments) for _, segments in trained)
        self.tied_bytes = self._sum((p.num_bytes, p.blocks) for p, _ in tied)
        self.tied_once_bytes = self._held((p.num_bytes, segments) for p, segments in tied)
        self.buffer_bytes = self.add_up(np.array([block.buffer_bytes for block in graph.blocks], dtype=np.float64))
        self.inputs = self._sized(self._held, [(i.size, self._segments(i.consumers)) for i in graph.inputs])
        sent = [(v, self._segments((v.producer, *v.consumers))) for v in graph.values]
        values = [(v.size, segments) for v, segments in sent]
        gradients = [(v.size, segments) for v, segments in sent if v.needs_gradient]
        self.received = self._sized(self._received, values)
        self.sent = self._sized(self._sent, values)
        self.gradients_received = self._sized(self._sent, gradients)
        self.gradients_sent = self._sized(self._received, gradients)

    @cached_property
    def ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The i and the j of every range that is not empty, row by row."""
        rows, columns = np.triu_indices(self.num_segments + 1, 1)
        return rows, columns

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

    def _held(self, things: _Things) -> Array:
        """Sums the things with at least one user in the range."""
        rectangles = _Rectangles(self.num_segments)
        for weight, users in things:
            before = -1
            for user in users:
                rectangles.add(weight, (before + 1, user + 1), (user + 1, self.num_segments + 1))
                before = user
        return rectangles.total()

    def _received(self, things: _Things) -> Array:
        """Sums the things that were made before the range and are used in it."""
        rectangles = _Rectangles(self.num_segments)
        for weight, holders in things:
            for before, user in pairwise(holders):
                rectangles.add(weight, (before + 1, user + 1), (user + 1, self.num_segments + 1))
        return rectangles.total()

    def _sent(self, things: _Things) -> Array:
        """Sums the things that the range makes or uses and that are used after it."""
        rectangles = _Rectangles(self.num_segments)
        for weight, holders in things:
            for holder, user in pairwise(holders):
                rectangles.add(weight, (0, holder + 1), (holder + 1, user + 1))
        return rectangles.total()

    def _sum(self, things: Iterable[tuple[float, Sequence[int]]]) -> Array:
        """Sums things once for each block that uses them."""
        weights = np.zeros(len(self.segment_of))
        for weight, blocks in things:
            weights[list(blocks)] += weight
        return self.add_up(weights)

    @staticmethod
    def _sized(total: Callable[[_Things], Array], things: Sequence[tuple[Size, Sequence[int]]]) -> SizedTable:
        return SizedTable(
            total((size.fixed_bytes, segments) for size, segments in things),
            total((size.sample_bytes, segments) for size, segments in things),
        )


class TablesOfGraph:
    """Makes the tables of a graph once for the same positions: the searches of one plan begin with the same ones."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._made: dict[tuple[int, ...], RangeTables] = {}

    def at(self, positions: Sequence[int]) -> RangeTables:
        """Returns the tables for cuts at these positions."""
        key = tuple(positions)
        if key not in self._made:
            self._made[key] = RangeTables(self.graph, key)
        return self._made[key]


def gradient_bytes(graph: Graph) -> Array:
    """Returns the bytes of the gradients that each block makes; a parameter's uses have one each."""
    made = np.zeros(len(graph.blocks))
    for parameter in graph.parameters:
        if parameter.needs_gradient:
            made[list(parameter.blocks)] += parameter.num_bytes
    return made


def _largest(graph: Graph, parameters: Iterable[Parameter]) -> Array:
    """Returns the bytes of the largest of some parameters in each block."""
    largest = np.zeros(len(graph.blocks))
    for parameter in parameters:
        places = list(parameter.blocks)
        largest[places] = np.maximum(largest[places], parameter.num_bytes)
    return largest
