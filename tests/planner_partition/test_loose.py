"""Holds what is followed while loose nodes move, and which of them come back into the search."""

from __future__ import annotations

import random

import pytest

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.load import RunningLoads, device_loads
from autovaruna.planner.partition.loose import still_dropped
from autovaruna.planner.partition.problem import Border
from tests.planner_partition.brute_force import groups_of, random_problem


@pytest.mark.parametrize("border", ["added", "overlapped"])
def test_running_loads_are_those_of_the_definition(border: Border) -> None:
    for seed in range(4000, 4040):
        problem, num_devices = random_problem(seed, border)
        draw = random.Random(seed)
        running = RunningLoads(problem, [draw.randrange(num_devices) for _ in problem.nodes], num_devices)
        for group in groups_of(problem):
            _, greatest, total = running.rank_with(group, draw.randrange(num_devices))
            loads = device_loads(problem, running.devices, num_devices)
            assert (greatest, total) == pytest.approx((max(loads), sum(loads)), abs=1e-9), seed


def test_running_loads_tell_how_many_bytes_are_too_many() -> None:
    problem, num_devices = next(
        drawn for seed in range(100) if (drawn := random_problem(seed))[0].limit_bytes and drawn[1] > 1
    )
    running = RunningLoads(problem, [0] * len(problem.nodes), num_devices)
    missing, _, _ = running.rank_with([0], 0)
    assert missing == max(0, problem.total_bytes() - (problem.limit_bytes or 0))


@pytest.fixture
def three_sums() -> BlockGraph:
    """Two ordered blocks and three loose ones, with nets of 1, 2 and 3 seconds to both."""
    return BlockGraph(
        members=((0,), (1,), (2,), (3,), (4,)),
        seconds=(1.0,) * 5,
        num_bytes=(0,) * 5,
        edges=frozenset({(0, 1)}),
        nets=((0b00111, 1.0), (0b01011, 2.0), (0b10011, 3.0)),
    )


def test_blocks_with_the_dearest_cut_nets_come_back_first(three_sums: BlockGraph) -> None:
    apart = [0, 1, 0, 0, 0]
    assert still_dropped(three_sums, apart, [2, 3, 4], 1) == [2, 3]
    assert still_dropped(three_sums, apart, [2, 3, 4], 2) == [2]


def test_a_block_comes_back_even_if_no_net_is_cut(three_sums: BlockGraph) -> None:
    assert len(still_dropped(three_sums, [0] * 5, [2, 3, 4], 1)) == 2
    assert still_dropped(three_sums, [], [2, 3, 4], 3) == []
