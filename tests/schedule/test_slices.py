"""Micro-batches are slices of mini-batches."""

from __future__ import annotations

from itertools import product

from autovaruna.schedule.pipeline import slices


def test_the_slices_of_a_mini_batch_follow_each_other_and_are_even() -> None:
    for mini_batches, num_micro_batches in product(((8,), (5, 8), (5, 0, 7), (2, 2, 9)), range(3, 12)):
        found = slices(mini_batches, num_micro_batches)
        assert len(found) == num_micro_batches
        for group, samples in enumerate(mini_batches):
            mine = found[group :: len(mini_batches)]
            sizes = [size for _, size in mine]
            assert [start for start, _ in mine] == [sum(sizes[:k]) for k in range(len(mine))]
            assert sum(sizes) == samples and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_a_mini_batch_without_a_micro_batch_is_in_none() -> None:
    assert slices((4, 6), 1) == [(0, 4)]
