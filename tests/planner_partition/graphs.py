"""Builds problems with a shape: chains, parallel branches, grids, and training steps that mirror them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from autovaruna.planner.partition import Border, PartitionNode, PartitionProblem

Edges = list[tuple[int, int]]


def branches(num_branches: int, length: int) -> tuple[int, Edges]:
    """Returns the size and edges of branches between one first and one last node: many downsets."""
    last = num_branches * length + 1
    edges = []
    for branch in range(num_branches):
        nodes = [0, *range(1 + branch * length, 1 + (branch + 1) * length), last]
        edges += itertools.pairwise(nodes)
    return last + 1, edges


def grid(rows: int, columns: int) -> tuple[int, Edges]:
    """Returns the size and edges of a grid in which each node feeds the next in its row and in its column."""
    right = [(row * columns + i, row * columns + i + 1) for row in range(rows) for i in range(columns - 1)]
    down = [(row * columns + i, (row + 1) * columns + i) for row in range(rows - 1) for i in range(columns)]
    return rows * columns, right + down


def forward_problem(size: int, edges: Edges, seed: int = 0, crossing: float = 0.1) -> PartitionProblem:
    """Gives nodes random times; a crossing costs up to `crossing`."""
    draw = random.Random(seed)
    nodes = tuple(
        PartitionNode(f"n{i}", draw.uniform(0.2, 2.0), draw.uniform(0.0, crossing), draw.randint(1, 9))
        for i in range(size)
    )
    return PartitionProblem(nodes, tuple((f"n{a}", f"n{b}") for a, b in edges))


def training_problem(size: int, edges: Edges, seed: int = 0, crossing: float = 0.1) -> PartitionProblem:
    """Adds a backward node to each node, on the same device, with the edges turned round."""
    forward = forward_problem(size, edges, seed, crossing)
    paired = tuple(
        PartitionNode(
            node.name + side, node.seconds * times, node.crossing_seconds, node.num_bytes, side == "b", node.name
        )
        for side, times in (("f", 1.0), ("b", 2.0))
        for node in forward.nodes
    )
    arrows = [(a + "f", b + "f") for a, b in forward.edges] + [(b + "b", a + "b") for a, b in forward.edges]
    return PartitionProblem(paired, tuple(arrows))


def chain_problem(
    seconds: Sequence[float], border: Border = "added", limit_bytes: int | None = None
) -> PartitionProblem:
    """Builds a chain whose nodes take 10 bytes and whose crossings cost 1 second."""
    nodes = tuple(PartitionNode(f"n{i}", figure, 1.0, 10) for i, figure in enumerate(seconds))
    edges = tuple((f"n{i}", f"n{i + 1}") for i in range(len(nodes) - 1))
    return PartitionProblem(nodes, edges, border, limit_bytes)
