"""Proves by brute force that a dropped cut is beaten in every plan."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain, combinations, pairwise

import pytest

from autovaruna.graph.cuts import crossing_sizes, merge_free_blocks
from autovaruna.graph.records import Size, Value

Stages = tuple[tuple[int, ...], ...]


def work_of(cuts: Sequence[int], is_free: Sequence[bool]) -> Stages:
    """Returns the blocks that cost something, by stage; a stage of views alone is none."""
    edges = [0, *(cut + 1 for cut in cuts), len(is_free)]
    stages = [tuple(k for k in range(a, b) if not is_free[k]) for a, b in pairwise(edges)]
    return tuple(stage for stage in stages if stage)


def bytes_of(cuts: Sequence[int], is_free: Sequence[bool], crossing: Sequence[Size]) -> list[list[Size]]:
    """Returns, for each place between two stages that work, the sizes of the plan's cuts there."""
    places: dict[int, list[Size]] = {}
    for cut in cuts:
        before = sum(not free for free in is_free[: cut + 1])
        if 0 < before < sum(not free for free in is_free):
            places.setdefault(before, []).append(crossing[cut])
    return [places[key] for key in sorted(places)]


def is_as_good(one: Sequence[list[Size]], other: Sequence[list[Size]]) -> bool:
    """Whether at each place the first plan sends no more than the second, for any micro-batch size."""
    return all(
        any(mine.fixed_bytes <= its.fixed_bytes and mine.sample_bytes <= its.sample_bytes for its in theirs)
        for ours, theirs in zip(one, other, strict=True)
        for mine in ours
    )


def subsets(cuts: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Returns every plan that may use some cuts."""
    return chain.from_iterable(combinations(cuts, size) for size in range(len(cuts) + 1))


def kept_cuts(merged: Sequence[tuple[str, ...]]) -> list[int]:
    """Returns the cuts between merged blocks, as places between the old ones."""
    lengths = [len(block) for block in merged]
    return [sum(lengths[: k + 1]) - 1 for k in range(len(lengths) - 1)]


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_has_one_as_good_without_dropped_cuts(seed: int) -> None:
    """Chains of up to seven blocks, some of views alone, with any bytes: all plans against all that are left."""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 7)
    is_free = [rng.random() < 0.5 for _ in range(num_blocks)]
    crossing = [Size(rng.randint(0, 2), rng.randint(0, 2)) for _ in range(num_blocks)]
    merged = merge_free_blocks([(str(k),) for k in range(num_blocks)], crossing, is_free.__getitem__)
    assert [name for block in merged for name in block] == [str(k) for k in range(num_blocks)]
    left = [(work_of(plan, is_free), bytes_of(plan, is_free, crossing)) for plan in subsets(kept_cuts(merged))]
    for plan in subsets(range(num_blocks - 1)):
        work, sent = work_of(plan, is_free), bytes_of(plan, is_free, crossing)
        assert any(mine == work and is_as_good(ours, sent) for mine, ours in left), plan


def test_cuts_between_work_are_all_kept() -> None:
    """Where no block is free, nothing is dropped, however dear a cut is."""
    crossing = [Size(0, 9), Size(0, 1), Size(0, 5), Size(0, 0)]
    assert len(merge_free_blocks([("a",), ("b",), ("c",), ("d",)], crossing, lambda index: False)) == 4


def test_crossing_sizes_count_a_value_once_a_cut() -> None:
    """A value crosses every cut between its producer and its last consumer, whoever uses it between."""
    values = [Value("a", 0, (1, 3), Size(1.0, 2.0), True), Value("b", 2, (3,), Size(0.0, 5.0), True)]
    assert crossing_sizes(values, 4) == [Size(1.0, 2.0), Size(1.0, 2.0), Size(1.0, 7.0), Size(0.0, 0.0)]
