"""Holds graphs without the bytes of small blocks against every split, and against what took all downsets."""

from __future__ import annotations

import math
import time

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.partition import Border, PartitionNode, PartitionProblem, partition
from autovaruna.planner.partition.blocks import build_blocks
from autovaruna.planner.partition.bounds import Bounds
from autovaruna.planner.partition.lighten import lighten, search_lightened, weigh_again
from tests.planner_partition.brute_force import optimum, random_problem

_BORDERS: tuple[Border, ...] = ("added", "overlapped")


def _bounds(problem: PartitionProblem, num_devices: int) -> Bounds:
    return Bounds(problem, num_devices, 1e-9, time.monotonic() + 500.0)


@pytest.mark.parametrize("border", _BORDERS)
def test_the_optimum_lies_between_what_is_proven_and_what_is_found(border: Border) -> None:
    num_met = num_apart = 0
    for seed in range(6000, 6100):
        problem, num_devices = random_problem(seed, border, most_nodes=6)
        best = optimum(problem, num_devices)
        graph, bounds = build_blocks(problem), _bounds(problem, num_devices)
        if problem.limit_bytes is None or math.isinf(best) or best == 0:
            continue
        search_lightened(graph, bounds, 10_000)
        assert bounds.lower <= best * (1 + 1e-9) <= bounds.upper * (1 + 2e-9), seed
        num_met += bounds.is_closed
        num_apart += 0 < bounds.lower < bounds.upper
    assert num_met >= 5 and num_apart >= 3


def test_what_cannot_fit_without_small_blocks_is_impossible() -> None:
    """Every split of the three large blocks over two devices exceeds 10 bytes on one of them."""
    nodes = tuple(PartitionNode(f"n{i}", 1.0, 0.1, size) for i, size in enumerate([6, 1, 6, 1, 6]))
    problem = PartitionProblem(nodes, tuple((f"n{i}", f"n{i + 1}") for i in range(4)), limit_bytes=10)
    bounds = _bounds(problem, 2)
    search_lightened(build_blocks(problem), bounds, 10_000)
    assert bounds.is_impossible
    with pytest.raises(PlanError, match="3 are missing"):
        partition(problem, 2)


def test_small_blocks_join_and_are_weighed_again() -> None:
    """A chain of dear crossings is one block without bytes, which takes all of them in the end."""
    nodes = tuple(PartitionNode(f"n{i}", 0.1, 5.0, size) for i, size in enumerate([1, 2, 3, 40]))
    problem = PartitionProblem(nodes, tuple((f"n{i}", f"n{i + 1}") for i in range(3)), limit_bytes=45)
    graph, bounds = build_blocks(problem), _bounds(problem, 2)
    assert [len(lighten(graph, bounds, size)) for size in (0, 1, 2, 3)] == [4, 3, 2, 1]
    lighter = lighten(graph, bounds, 2)
    assert sorted(lighter.num_bytes) == [3, 40] and sorted(weigh_again(lighter, bounds).num_bytes) == [6, 40]


def test_weights_that_feed_a_chain_double_no_downsets() -> None:
    """Without memory each weight joins its layer; under a limit, all subsets of them were downsets."""
    layers = [PartitionNode(f"layer{i}", 1.0 + 0.1 * i, 0.5, 50 + i) for i in range(20)]
    weights = [PartitionNode(f"weight{i}", 0.0, 0.3, 7) for i in range(20)]
    edges = [(f"layer{i}", f"layer{i + 1}") for i in range(19)] + [(f"weight{i}", f"layer{i}") for i in range(20)]
    problem = PartitionProblem((*layers, *weights), tuple(edges), limit_bytes=600)
    found = partition(problem, 4, max_downsets=5_000)
    assert found.gap == 0.0 and "without the bytes of small blocks" in found.proof
    assert all(found.assignment[f"layer{i}"] == found.assignment[f"weight{i}"] for i in range(20))
