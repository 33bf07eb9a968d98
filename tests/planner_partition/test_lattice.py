"""Holds the list of downsets against counting them one by one, and against known numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autovaruna.planner.partition.blocks import BlockGraph, build_blocks
from autovaruna.planner.partition.lattice import count, list_downsets
from autovaruna.planner.partition.words import byte_sums, expand, pack, unpack, weigh
from tests.planner_partition.brute_force import random_problem
from tests.planner_partition.graphs import branches, forward_problem, grid


def _downsets(graph: BlockGraph) -> set[int]:
    return {mask for mask in range(1 << len(graph)) if all(mask >> a & 1 or not mask >> b & 1 for a, b in graph.edges)}


def test_every_downset_is_listed_once_with_its_open_nets() -> None:
    for seed in range(60):
        graph = build_blocks(random_problem(seed, most_nodes=8)[0])
        levels = list_downsets(graph, 10_000)
        assert levels is not None
        listed = [unpack(row) for level in levels for row in level.downsets]
        assert len(listed) == len(set(listed)) == count(levels)
        assert set(listed) == _downsets(graph)
        for level in levels:
            for downset, opened, border in zip(level.downsets, level.open_nets, level.border, strict=True):
                inside = unpack(downset)
                cut = [i for i, (net, _) in enumerate(graph.nets) if net & inside and net & ~inside]
                assert unpack(opened) == sum(1 << i for i in cut)
                assert border == pytest.approx(sum(graph.nets[i][1] for i in cut), abs=1e-9)


def test_steps_add_one_block() -> None:
    graph = build_blocks(forward_problem(*grid(3, 4)))
    levels = list_downsets(graph, 1000)
    assert levels is not None
    for level, after in itertools.pairwise(levels):
        source = np.repeat(np.arange(len(level.downsets)), np.diff(level.first))
        for i, block, target in zip(source, level.block, level.target, strict=True):
            assert unpack(level.downsets[i]) | 1 << int(block) == unpack(after.downsets[target])


@pytest.mark.parametrize(("rows", "columns"), [(1, 9), (3, 4), (5, 6)])
def test_a_grid_has_as_many_downsets_as_lattice_paths(rows: int, columns: int) -> None:
    levels = list_downsets(build_blocks(forward_problem(*grid(rows, columns))), 100_000)
    assert levels is not None
    assert count(levels) == math.comb(rows + columns, rows)


def test_branches_multiply() -> None:
    levels = list_downsets(build_blocks(forward_problem(*branches(3, 4))), 1000)
    assert levels is not None
    assert count(levels) == 5**3 + 2


def test_too_many_downsets_are_not_listed() -> None:
    assert list_downsets(build_blocks(forward_problem(*branches(3, 4))), 126) is None


def test_a_listing_ends_in_time() -> None:
    assert list_downsets(build_blocks(forward_problem(*branches(3, 4))), 1000, deadline=0.0) is None


def test_sets_of_more_than_a_word_keep_their_elements() -> None:
    masks = [0, 1, 1 << 63 | 1 << 64, (1 << 130) - 1]
    rows = pack(masks, 130)
    figures = np.arange(130, dtype=np.float64) ** 2
    assert [unpack(row) for row in rows] == masks
    sums = weigh(rows, byte_sums(list(figures), rows.shape[1]))
    assert sums.tolist() == [sum(figures[i] for i in range(130) if mask >> i & 1) for mask in masks]


def test_expand_walks_ranges() -> None:
    row, position = expand(np.array([5, 0, 2]), np.array([2, 0, 3]))
    assert row.tolist() == [0, 0, 2, 2, 2]
    assert position.tolist() == [5, 6, 2, 3, 4]
