"""Says that the walk ends at plans that are valid, as good as it says, and near the best."""

from __future__ import annotations

import time

import pytest

from autovaruna.planner.partition import Border, PartitionProblem, anneal, partition
from autovaruna.planner.partition.anneal import anneal as walk
from autovaruna.planner.partition.blocks import build_blocks
from autovaruna.planner.partition.bounds import Bounds
from autovaruna.planner.partition.chains import best_chain
from autovaruna.planner.partition.resources import resources_of
from tests.planner_partition.brute_force import greatest_load, is_valid, random_problem
from tests.planner_partition.graphs import grid, training_problem

_BORDERS: tuple[Border, ...] = ("added", "overlapped")


def _walked(problem: PartitionProblem, num_devices: int) -> tuple[float, Bounds] | None:
    """Returns the load that the walk begins with, and what is known after it."""
    graph = build_blocks(problem)
    bounds = Bounds(problem, num_devices, 1e-9, time.monotonic() + 500.0)
    chain = best_chain(graph, resources_of(graph, problem.border, problem.limit_bytes), num_devices)
    if chain is None:
        return None
    bounds.offer(graph, chain)
    before = bounds.upper
    walk(graph, bounds)
    return before, bounds


@pytest.mark.parametrize("border", _BORDERS)
def test_plans_of_a_walk_are_valid(border: Border, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anneal, "_MOVES", 4096)
    num_better = 0
    for seed in range(5900, 6000):
        problem, num_devices = random_problem(seed, border)
        if (found := _walked(problem, num_devices + 1)) is None:
            continue
        before, bounds = found
        assert bounds.devices is not None and is_valid(problem, bounds.devices), seed
        assert greatest_load(problem, bounds.devices) == pytest.approx(bounds.upper), seed
        num_better += bounds.upper < before * (1 - 1e-9)
    assert num_better >= 2


def test_a_walk_ends_at_a_plan_that_single_moves_from_the_first_do_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anneal, "_MOVES", 60_000)
    problem = training_problem(*grid(4, 6), seed=2, crossing=0.8)
    found = _walked(problem, 4)
    assert found is not None
    before, bounds = found
    assert bounds.upper == pytest.approx(partition(problem, 4).objective) and before > 1.02 * bounds.upper
