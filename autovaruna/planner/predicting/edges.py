"""Finds the messages between stages: a value goes from each stage that has it to the next one that uses it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autovaruna.graph.records import Graph
from autovaruna.schedule import Edge


class Edges:
    """Finds the edges of plans of one graph, all values at once: a search asks for thousands of plans.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.num_blocks = len(graph.blocks)
        holders = [(v, block) for v, value in enumerate(graph.values) for block in (value.producer, *value.consumers)]
        self.values, self.blocks = np.array(holders, dtype=np.int64).reshape(-1, 2).T
        self.fixed_bytes = np.array([value.size.fixed_bytes for value in graph.values], dtype=np.float64)
        self.sample_bytes = np.array([value.size.sample_bytes for value in graph.values], dtype=np.float64)
        self.has_gradient = np.array([value.needs_gradient for value in graph.values], dtype=bool)
        self.known = lru_cache(maxsize=64)(self._between)

    def between(self, stages: tuple[tuple[int, ...], ...], micro_batch_size: float) -> tuple[Edge, ...]:
        """Returns the edges between stages.

        Args:
            stages: the blocks of each stage.
            micro_batch_size: how many samples a message is about.
        """
        return self.known(stages, micro_batch_size)

    def _between(self, stages: tuple[tuple[int, ...], ...], micro_batch_size: float) -> tuple[Edge, ...]:
        stage_of, count = np.empty(self.num_blocks, dtype=np.int64), len(stages)
        for stage, blocks in enumerate(stages):
            is_range = blocks[-1] - blocks[0] + 1 == len(blocks)
            stage_of[slice(blocks[0], blocks[-1] + 1) if is_range else list(blocks)] = stage
        held = np.sort(self.values * count + stage_of[self.blocks])
        values, holders = np.divmod(held, count)
        is_sent = (values[1:] == values[:-1]) & (held[1:] != held[:-1])
        sent = values[1:][is_sent]
        pairs, pair_of = np.unique((holders[:-1] * count + holders[1:])[is_sent], return_inverse=True)
        num_bytes = (self.fixed_bytes + self.sample_bytes * micro_batch_size)[sent]
        has_gradient = self.has_gradient[sent]
        forward = np.bincount(pair_of, num_bytes, len(pairs))
        backward = np.bincount(pair_of, np.where(has_gradient, num_bytes, 0.0), len(pairs))
        goes_back = np.bincount(pair_of, has_gradient, len(pairs)) > 0
        columns = (pairs // count, pairs % count, forward, backward, goes_back)
        return tuple(Edge(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
