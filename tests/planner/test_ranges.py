"""A profile read at sizes that were not measured, and the chain partition against all splits there are."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from autovaruna.planner.arrays import Array, CostTable
from autovaruna.planner.partition import partition_chain
from autovaruna.profiler.records import BlockCost, Profile


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


def test_one_size_scales_in_proportion_and_the_order_of_sizes_does_not_matter() -> None:
    assert CostTable(profile((2, 3.0))).at(6).forward_seconds[0] == pytest.approx(9.0)
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


def random_costs(rng: random.Random, n: int, share_forbidden: float) -> Array:
    costs = np.array([[rng.uniform(0, 10) for _ in range(n + 1)] for _ in range(n + 1)])
    forbidden = np.array([[rng.random() < share_forbidden for _ in range(n + 1)] for _ in range(n + 1)])
    return np.where(forbidden, np.inf, costs)


def value(costs: list[Array], starts: tuple[int, ...]) -> float:
    ends = [*starts[1:], costs[0].shape[0] - 1]
    return max(float(stage[i, j]) for stage, i, j in zip(costs, starts, ends, strict=True))


def test_equals_the_best_of_all_splits() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        n = rng.randint(1, 8)
        num_stages = rng.randint(1, n)
        costs = [random_costs(rng, n, rng.choice([0.0, 0.3])) for _ in range(num_stages)]
        best = min(value(costs, (0, *inner)) for inner in combinations(range(1, n), num_stages - 1))
        found = partition_chain(costs)
        assert (found is None) == np.isinf(best), seed
        if found:
            assert value(costs, found) == best, seed
