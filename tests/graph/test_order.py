"""Holds the orders of what waits for one another, on random graphs, against a library of graphs."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from autovaruna.graph.grouping import Sets, free_first, waiting_both_ways


def drawn(seed: int, *, has_cycles: bool) -> nx.DiGraph[int]:
    """Returns a random graph."""
    draw, graph = random.Random(seed), nx.DiGraph()
    size = draw.randint(1, 12)
    graph.add_nodes_from(draw.sample(range(size), size))
    for _ in range(draw.randint(0, 2 * size)):
        first, other = draw.randrange(size), draw.randrange(size)
        if first != other and (has_cycles or first % 5 < other % 5):
            graph.add_edge(first, other)
    return graph


@pytest.mark.parametrize("seed", range(50))
def test_groups_that_wait_both_ways_are_strong_components(seed: int) -> None:
    """Things that wait for nobody who waits for them are in no group."""
    graph = drawn(seed, has_cycles=True)
    found = waiting_both_ways({each: {*graph[each]} for each in graph})
    assert {frozenset(group) for group in found} == {
        frozenset(each) for each in nx.strongly_connected_components(graph) if len(each) > 1
    }


@pytest.mark.parametrize("seed", range(50))
def test_what_is_free_comes_by_its_key(seed: int) -> None:
    """The order is the least one, by keys, of those that keep everyone waiting."""
    graph = drawn(seed, has_cycles=False)
    found = free_first({each: {*graph[each]} for each in graph}, lambda each: -each)
    assert found == list(nx.lexicographical_topological_sort(graph, key=lambda each: -each))


def test_joined_sets_are_one() -> None:
    """Sets that share a member become one; the others stay apart."""
    sets = Sets(range(8))
    for joined in ([0, 1], [2, 3, 4], [4, 1], [6, 5]):
        sets.join(joined)
    assert len({sets[each] for each in range(5)}) == 1
    assert len({sets[each] for each in range(8)}) == 3
