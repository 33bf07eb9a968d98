"""Holds the partition against every split of small random graphs."""

from __future__ import annotations

import math

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.partition import Border, partition
from tests.planner_partition.brute_force import greatest_load, is_valid, optimum, random_problem

_SEEDS_IN_ONE = 60


@pytest.mark.parametrize("border", ["added", "overlapped"])
@pytest.mark.parametrize("batch", range(6))
def test_partition_is_the_best_of_all_splits(batch: int, border: Border) -> None:
    for seed in range(_SEEDS_IN_ONE * batch, _SEEDS_IN_ONE * (batch + 1)):
        problem, num_devices = random_problem(seed, border)
        best = optimum(problem, num_devices)
        if math.isinf(best):
            with pytest.raises(PlanError):
                partition(problem, num_devices)
            continue
        found = partition(problem, num_devices)
        devices = [found.assignment[node.name] for node in problem.nodes]
        assert is_valid(problem, devices), seed
        assert found.objective == pytest.approx(greatest_load(problem, devices), rel=1e-12), seed
        assert found.objective == pytest.approx(best, rel=1e-8), seed
        assert found.lower_bound == pytest.approx(best, rel=1e-8), seed
        assert found.gap == 0.0


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("border", ["added", "overlapped"])
def test_the_optimum_is_within_the_gap_where_downsets_are_too_many_to_list(border: Border) -> None:
    num_closed = num_searched = 0
    for seed in range(7000, 7060):
        problem, num_devices = random_problem(seed, border, most_nodes=8)
        best = optimum(problem, num_devices)
        if math.isinf(best):
            continue
        found = partition(problem, num_devices, max_downsets=2)
        assert is_valid(problem, [found.assignment[node.name] for node in problem.nodes]), seed
        assert found.lower_bound <= best * (1 + 1e-8) <= found.objective * (1 + 2e-8), seed
        num_closed += found.gap == 0.0
        num_searched += 1
    assert num_closed > 0.7 * num_searched > 20
