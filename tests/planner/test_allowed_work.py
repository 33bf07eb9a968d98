"""Holds that the work that memory allows is the least over every way that fits."""

from __future__ import annotations

import numpy as np
import pytest

from autovaruna.planner.ranges import Array
from autovaruna.planner.stage_memory import RecomputeOptions, StageBytes

SHAPE = (9, 7)


def _ways(rng: np.random.Generator) -> RecomputeOptions:
    """Draws a fast way that takes much memory and a slow one that takes less; the last column is in no range."""

    def drawn(most: float) -> Array:
        table = rng.uniform(0, most, SHAPE)
        table[:, -1] = np.inf
        return table

    work, times = drawn(4), (1.0, 0.4)
    none = np.zeros(SHAPE)
    held = (StageBytes(drawn(9) * f, drawn(3) * f, drawn(6) * f, drawn(9) * f, none, none, none) for f in times)
    return RecomputeOptions(tuple(zip((work, work + drawn(2)), held, strict=True)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [3, 8])
def test_allowed_work_is_the_least_of_all_ways_that_fit(seed: int, share: int) -> None:
    rng = np.random.default_rng(seed)
    ways, limit, in_flight = _ways(rng), rng.uniform(2, 20), int(rng.integers(1, share + 1))
    expected = np.full(SHAPE, np.inf)
    for depth in (in_flight, (in_flight + 1) // 2, 1):
        for seconds, num_bytes in ways.options:
            slowed = seconds * (in_flight / depth)
            expected = np.where(num_bytes.at(depth, share) <= limit, np.minimum(slowed, expected), expected)
    assert np.array_equal(ways.within(limit, share).allowed_work(in_flight), expected)


@pytest.mark.parametrize("share", range(1, 7))
def test_a_range_fits_down_from_its_greatest_depth(share: int) -> None:
    """Whole numbers, so that many peaks are just the limit, and some take nothing for a micro-batch."""
    rng = np.random.default_rng(share)
    for limit in range(1, 40):
        held = StageBytes(*(rng.integers(0, most, (5, 5)).astype(float) for most in (20, 4, 20, 20, 3, 3, 3)))
        deepest = held.depth_within(limit, share)
        for depth in range(1, share + 1):
            assert np.array_equal(held.at(depth, share) <= limit, deepest >= depth)
