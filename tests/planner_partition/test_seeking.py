"""Holds the bounds that narrow a search down against every downset and every split: they may be loose, never wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autovaruna.planner.partition.blocks import BlockGraph, bits, build_blocks
from autovaruna.planner.partition.bounds import chain_load
from autovaruna.planner.partition.chains import best_chain
from autovaruna.planner.partition.cheap import CheapCuts
from autovaruna.planner.partition.contract import closures
from autovaruna.planner.partition.few_cuts import FewCuts
from autovaruna.planner.partition.narrow import narrow_order
from autovaruna.planner.partition.problem import Border
from autovaruna.planner.partition.resources import Resources, resources_of
from autovaruna.planner.partition.room import Room
from autovaruna.planner.partition.seeking import Seeker
from tests.planner_partition.brute_force import random_problem
from tests.planner_partition.cut_cases import downsets, is_within, random_limits
from tests.planner_partition.graphs import Edges, branches, forward_problem, grid, training_problem

_BORDERS: tuple[Border, ...] = ("added", "overlapped")
_MANY = 100_000


def _heads(num_layers: int, num_heads: int) -> tuple[int, Edges]:
    """Returns the size and edges of layers, in each of which heads of 5 nodes lie side by side; breadth first."""
    edges: Edges = []
    first = 0
    for _ in range(num_layers):
        rows = [first + 1 + row * num_heads for row in range(5)]
        last = first + 1 + 5 * num_heads
        for head in range(num_heads):
            query, key, value, scores, context = (row + head for row in rows)
            edges += [(first, query), (first, key), (first, value), (query, scores), (key, scores)]
            edges += [(scores, context), (value, context), (context, last)]
        first = last
    return first + 1, edges


def _most_open(graph: BlockGraph, order: list[int]) -> int:
    """Returns how many blocks at most, of those placed, have an edge to one that is not."""
    place = {block: position for position, block in enumerate(order)}
    last = [max([place[b] for a, b in graph.edges if a == block], default=0) for block in range(len(graph))]
    return max(sum(place[b] < at <= last[b] for b in range(len(graph))) for at in range(len(graph)))


def test_a_narrow_order_keeps_the_edges() -> None:
    for seed in range(5600, 5650):
        graph = build_blocks(random_problem(seed)[0])
        order = narrow_order(graph, closures(graph)[0])
        assert sorted(order) == list(range(len(graph)))
        assert all(order.index(a) < order.index(b) for a, b in graph.edges), seed


def test_a_narrow_order_ends_one_head_before_the_next() -> None:
    graph = build_blocks(training_problem(*_heads(2, 6)))
    assert _most_open(graph, narrow_order(graph, closures(graph)[0])) <= 9
    assert _most_open(graph, list(range(len(graph)))) > 12


def _even_graphs(border: Border, rows: int = 3, length: int = 2) -> Iterator[tuple[BlockGraph, Resources]]:
    """Yields graphs of nodes with equal seconds, and small ones of all kinds."""
    for seed in range(6):
        problem = forward_problem(*(grid(rows, 3) if seed % 2 else branches(3, length)), seed=seed, crossing=1.5)
        nodes = tuple(replace(node, seconds=1.0) for node in problem.nodes)
        graph = build_blocks(replace(problem, nodes=nodes))
        yield graph, resources_of(graph, border, None)
    for seed in range(5700, 5725):
        problem = random_problem(seed, border, most_nodes=7)[0]
        graph = build_blocks(problem)
        if graph.nets:
            yield graph, resources_of(graph, border, None)


@pytest.mark.parametrize("border", _BORDERS)
@pytest.mark.parametrize("most_states", [3, 12, 30, _MANY])
def test_least_figures_bound_all_downsets_within_limits(border: Border, most_states: int) -> None:
    draw, num_tight = np.random.default_rng(0), 0
    for count, (graph, resources) in enumerate(_even_graphs(border, 4, 3)):
        crossing, totals = resources.crossing, resources.use.sum(axis=1)
        limits = random_limits(graph, totals + 1e-3, draw)
        if count % 2:
            wide = replace(limits, before=9 * limits.before, after=9 * limits.after, most_price=math.inf)
            limits = replace(wide, most_before=3 * limits.most_before, most_after=3 * limits.most_after)
        found = CheapCuts(graph, resources).least(limits, most_states)
        assert found is not None and len(found.cuts) <= most_states
        for mask in downsets(graph):
            if not is_within(graph, resources.use, crossing, limits, mask):
                continue
            is_open = np.array([bool(net & mask and net & ~mask) for net, _ in graph.nets], dtype=bool)
            price, share = float(limits.prices[is_open].sum()), float(limits.shares[is_open].sum())
            used = resources.use[:, list(bits(mask))].sum(axis=1)
            if price < found.dropped - 1e-9:
                assert found.price <= price + 1e-9
                assert (found.before <= used + crossing * share + 1e-9).all()
                assert (found.after <= totals - used + crossing * (price - share) + 1e-9).all()
                num_tight += abs(found.price - price) < 1e-9
    assert num_tight >= 1


@pytest.mark.parametrize("border", _BORDERS)
@pytest.mark.parametrize("most_states", [3, 12, _MANY])
def test_what_narrows_a_search_leaves_every_chain_within_the_limit(border: Border, most_states: int) -> None:
    num_left = num_closed = 0
    for graph, resources in _even_graphs(border):
        masks, everything = downsets(graph), (1 << len(graph)) - 1
        chains = [(a, b, everything) for a in masks for b in masks if not a & ~b]
        loads = [chain_load(graph, chain, border) for chain in chains]
        for share in (0.8, 1.0, 1.1):
            load = share * min(loads)
            seeker = Seeker(graph, CheapCuts(graph, resources), 3, most_states)
            room = Room(seeker.shares, resources, load, 0.0)
            is_left = not room.is_over and seeker.share_out(room, True, math.inf)
            good = [chain for chain, its_load in zip(chains, loads, strict=True) if its_load <= load]
            assert is_left or not good
            num_closed += not is_left
            for chain in good:
                for boundary in range(2):
                    limits = room.limits(boundary, math.inf)
                    assert is_within(graph, resources.use, resources.crossing, limits, chain[boundary], 1e-9)
                    num_left += 1
    assert num_left > 100 and num_closed >= 5


def test_wide_layers_are_closed_with_few_states() -> None:
    """Six heads have 50,000 downsets a layer; their states are alike once their nets are closed."""
    graph = build_blocks(training_problem(*_heads(3, 6), seed=2, crossing=0.3))
    resources = resources_of(graph, "added", None)
    chain = best_chain(graph, resources, 4)
    assert chain is not None
    few = FewCuts(graph, resources, 4, 20_000)
    load = chain_load(graph, chain, "added")
    lower = sum(graph.seconds) / 4
    answers = {share: few.decide(lower + share * (load - lower)) for share in (0.25, 0.5, 0.7)}
    assert all(answer.is_exact for answer in answers.values())
