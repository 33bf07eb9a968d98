"""Ranks that a split needs, asked again and again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations, pairwise

import numpy as np
import pytest

from autovaruna.planner.range_bounds import Computed, Demand, Listed, Needs
from autovaruna.planner.stage_memory import RecomputeOption


def listed(dice: np.random.Generator, num_ranges: int) -> Needs:
    one = dice.uniform(1.0, 9.0, num_ranges)
    return Listed([(replicas, one / replicas + 0.5) for replicas in (4, 2, 1)])


def computed(dice: np.random.Generator, num_ranges: int) -> Needs:
    work, again, trip = (dice.uniform(0.1, 1.0, num_ranges) for _ in range(3))
    depth = dice.integers(0, 4, num_ranges).astype(float)
    ways = [
        RecomputeOption(work, 0 * again, trip, depth, is_full=False),
        RecomputeOption(work + again, again, trip, depth + 1, is_full=False),
    ]
    return Computed(8, work * 9, trip, ways)


def fewest(needed: dict[tuple[int, int], float], n: int, num_stages: int) -> float:
    """Tries all splits."""
    counts = [num_stages] if num_stages else range(1, n + 1)
    splits = [(0, *inner, n) for count in counts for inner in combinations(range(1, n), count - 1)]
    return min(sum(needed[pair] for pair in pairwise(cuts)) for cuts in splits)


@pytest.mark.parametrize("kind", [listed, computed])
@pytest.mark.parametrize("num_stages", [0, 3])
@pytest.mark.parametrize("seed", range(10))
def test_bisection_answers_as_all_splits_do(
    kind: Callable[[np.random.Generator, int], Needs], num_stages: int, seed: int
) -> None:
    n, num_ranks, turns = 6, 5, random.Random(seed)
    rows, columns = np.triu_indices(n + 1, 1)
    needs = kind(np.random.default_rng(seed), len(rows))
    demand = Demand(needs, rows * (n + 1) + columns, n, num_stages, num_ranks)
    low, high, met = 0.0, 30.0, set()
    for _ in range(20):
        middle = low + (high - low) * turns.uniform(0.1, 0.9)
        each = dict(zip(zip(rows.tolist(), columns.tolist(), strict=True), needs.at(middle).tolist(), strict=True))
        is_met = demand.is_met(middle)
        assert is_met == (fewest(each, n, num_stages) <= num_ranks)
        met.add(is_met)
        low, high = (low, middle) if is_met else (middle, high)
    assert met == {True, False}
    assert math.isclose(low, high, rel_tol=1e-2)
