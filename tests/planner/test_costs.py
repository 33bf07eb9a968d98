"""Costs: a profile read at sizes that were not measured."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from autovaruna.planner.costs import CostTable
from autovaruna.profiler.records import NOT_RECORDED, BlockCost, Profile, Sequences


def profile(*rows: tuple[int, float]) -> Profile:
    """One block, forward seconds at each size."""
    costs = tuple((BlockCost(seconds, 2 * seconds, 100.0 * size, 10.0 * size),) for size, seconds in rows)
    return Profile("g", "test", tuple(size for size, _ in rows), costs)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 1.0), (2, 1.5), (3, 2.0), (4, 4.0), (5, 6.0), (6, 8.0)],
    ids=["measured", "between", "measured-2", "between-2", "measured-3", "beyond"],
)
def test_lines_between_the_nearest_sizes(size: float, expected: float) -> None:
    costs = CostTable(profile((1, 1.0), (3, 2.0), (5, 6.0))).at(size)
    assert costs.forward_seconds[0] == pytest.approx(expected)
    assert costs.backward_seconds[0] == pytest.approx(2 * expected)
    assert costs.saved_bytes[0] == pytest.approx(100 * size)


def test_one_size_scales_in_proportion() -> None:
    assert CostTable(profile((2, 3.0))).at(6).forward_seconds[0] == pytest.approx(9.0)


def test_order_of_sizes_does_not_matter() -> None:
    one, other = profile((1, 1.0), (4, 3.0)), profile((4, 3.0), (1, 1.0))
    assert CostTable(one).at(2.5).forward_seconds[0] == CostTable(other).at(2.5).forward_seconds[0]


def test_noise_never_makes_more_samples_cheaper_or_time_negative() -> None:
    rng = random.Random(3)
    for _ in range(40):
        sizes = sorted(rng.sample(range(1, 20), 3))
        noisy = profile(*((size, rng.uniform(0.1, 1.0)) for size in sizes))
        seconds = [CostTable(noisy).at(size).forward_seconds[0] for size in np.linspace(0.25, 40, 30)]
        assert seconds[0] > 0
        assert all(a <= b + 1e-12 for a, b in pairwise(seconds))


def recorded(*rows: tuple[int, Sequences]) -> CostTable:
    """One block with what it takes at each size."""
    costs = tuple((BlockCost(1.0, 1.0, 1.0, 1.0, sequences=each),) for _, each in rows)
    return CostTable(Profile("g", "test", tuple(size for size, _ in rows), costs))


def test_what_a_block_takes_lies_between_that_of_two_sizes() -> None:
    """A weight takes the same at each size; what is given back is named by number and stays."""
    table = recorded((2, Sequences((200, 64, -1), (20,))), (4, Sequences((400, 64, -1), (40,))))
    assert table.at(3).sequences_of(0) == Sequences((300, 64, -1), (30,))
    assert table.at(6).sequences_of(0) == Sequences((600, 64, -1), (60,))


def test_what_a_block_takes_is_that_of_the_nearer_size_if_its_steps_differ() -> None:
    few, many = Sequences((200,), (20,)), Sequences((400, 400, -2), (40,))
    table = recorded((2, few), (4, many))
    assert (table.at(2.5).sequences_of(0), table.at(3.5).sequences_of(0)) == (few, many)


def test_of_one_size_what_a_block_takes_is_in_proportion() -> None:
    assert recorded((2, Sequences((200, 100, -1)))).at(4).sequences_of(0) == Sequences((400, 200, -1))
    assert recorded((2, NOT_RECORDED)).at(4).sequences_of(0) == NOT_RECORDED
