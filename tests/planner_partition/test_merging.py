"""Says which states are merged, and what is left of them."""

from __future__ import annotations

from typing import cast

import numpy as np

from autovaruna.planner.partition.listing import Listing, States
from autovaruna.planner.partition.merging import Merger
from autovaruna.planner.partition.words import Floats, Words


class _Keys:
    """Stands for a listing: says what matters of each state, and that the figures of all are exact."""

    def __init__(self, keys: list[int]) -> None:
        self._keys = keys

    def what_matters(self, states: States, position: int) -> Words:
        return np.array([self._keys], dtype=np.uint64)

    def decided_seconds(self, states: States) -> Floats:
        return cast(Floats, states.used[0] + states.left_out[0])


def _states(used: list[float], price: list[float], share: list[float]) -> States:
    """Makes states, of which state i holds block i, with 9 seconds decided."""
    inside = np.array([[1 << i for i in range(len(used))]], dtype=np.uint64)
    seconds, dear = np.array([used]), np.array(price)
    return States(inside, ~inside, seconds, 9.0 - seconds, dear, np.array(share), dear - np.array(share))


def _merger(keys: list[int], most: int, width: float) -> Merger:
    return Merger(cast(Listing, _Keys(keys)), most, width, width)


def test_alike_states_become_the_cheapest_with_the_least_figures_of_all() -> None:
    states = _states([1.0, 1.1, 1.05, 5.0, 5.0], [3.0, 1.0, 2.0, 4.0, 6.0], [-1.0, 0.5, 2.0, 0.0, 1.0])
    merged = _merger([7, 7, 7, 7, 7], 4, 8.0).merge(states, 0)
    assert len(merged) == 2
    order = np.argsort(merged.used[0])
    assert merged.inside[0][order].tolist() == [2, 8]
    assert merged.used[0][order].tolist() == [1.0, 5.0]
    assert merged.left_out[0][order].tolist() == [9.0 - 1.1, 4.0]
    assert merged.price[order].tolist() == [1.0, 4.0]
    assert merged.share[order].tolist() == [-1.0, 0.0]
    assert merged.rest[order].tolist() == [0.0, 4.0]


def test_states_are_not_merged_twice_beyond_the_width() -> None:
    states = _states([1.0, 1.1, 3.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    states.left_out = states.left_out - np.array([[0.0, 1.5, 0.0]])  # the second one stands for some up to 2.6
    merger = Merger(cast(Listing, _Exact(9.0)), 2, 1.2, 1.2)
    assert len(merger.merge(states, 0)) == 1 and merger.dropped == 2.0
    assert len(Merger(cast(Listing, _Exact(9.0)), 2, 16.0, 16.0).merge(states, 0)) == 1


class _Exact(_Keys):
    """Stands for a listing in which all states have decided equal seconds and nothing else matters."""

    def __init__(self, seconds: float) -> None:
        super().__init__([0, 0, 0])
        self._seconds = seconds

    def decided_seconds(self, states: States) -> Floats:
        return np.full(len(states), self._seconds)


def test_unlike_states_stay_and_the_dearest_are_dropped() -> None:
    states = _states([1.0, 1.0, 1.0, 1.0, 1.0], [5.0, 1.0, 4.0, 2.0, 3.0], [0.0] * 5)
    merger = _merger([1, 2, 3, 4, 5], 4, 1.0)
    merged = merger.merge(states, 0)
    assert sorted(merged.price) == [1.0, 2.0]
    assert merger.dropped == 3.0
    assert _merger([1, 2, 3, 4, 5], 5, 1.0).merge(states, 0) is states
