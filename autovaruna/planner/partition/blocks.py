"""Groups nodes that no plan parts into blocks: the graph that the search works on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

from autovaruna.planner.partition.problem import PartitionProblem


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """Blocks in a topological order, with what orders them and what joins them.

    Sets of blocks are integers: bit b stands for block b.

    Attributes:
        members: the positions in ``problem.nodes`` of each block's nodes.
        seconds, num_bytes: of each block.
        edges: pairs (a, b), a < b: block a is on an earlier device than b, or on the same one.
        nets: for each set of blocks that share outputs, the seconds that each device pays which holds some of the set
            but not all of it.
    """

    members: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]
    edges: frozenset[tuple[int, int]]
    nets: tuple[tuple[int, float], ...]

    def __len__(self) -> int:
        return len(self.members)


def bits(mask: int) -> Iterator[int]:
    """Yields the positions of the ones of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def build_blocks(problem: PartitionProblem) -> BlockGraph:
    """Builds the blocks of a problem: its groups, with groups that lie on a common cycle joined."""
    index = problem.index()
    nodes = problem.nodes
    forward_edges: set[tuple[int, int]] = set()
    nets = [1 << position for position in range(len(nodes))]
    for source, target in ((index[a], index[b]) for a, b in problem.edges):
        nets[source] |= 1 << target
        if not nodes[source].is_backward and not nodes[target].is_backward:
            forward_edges.add((source, target))
    apart = BlockGraph(
        members=tuple((position,) for position in range(len(nodes))),
        seconds=tuple(node.seconds for node in nodes),
        num_bytes=tuple(node.num_bytes for node in nodes),
        edges=frozenset(forward_edges),
        nets=tuple((net, node.crossing_seconds) for net, node in zip(nets, nodes, strict=True)),
    )
    groups: dict[str, int] = {}
    labels = [
        position if node.group is None else groups.setdefault(node.group, position)
        for position, node in enumerate(nodes)
    ]
    return join_blocks(apart, labels)


def join_blocks(graph: BlockGraph, labels: Sequence[int]) -> BlockGraph:
    """Joins blocks of equal label, and then blocks on a common cycle, which no chain of downsets parts."""
    order = nx.DiGraph()
    order.add_nodes_from(labels)
    order.add_edges_from((labels[a], labels[b]) for a, b in graph.edges if labels[a] != labels[b])
    condensed = nx.condensation(order)
    component: dict[int, int] = condensed.graph["mapping"]
    place = {old: new for new, old in enumerate(nx.topological_sort(condensed))}
    new = [place[component[label]] for label in labels]
    return BlockGraph(
        members=_sum_members(graph, new, len(place)),
        seconds=tuple(_sum_by(graph.seconds, new, len(place))),
        num_bytes=tuple(int(total) for total in _sum_by(graph.num_bytes, new, len(place))),
        edges=frozenset((new[a], new[b]) for a, b in graph.edges if new[a] != new[b]),
        nets=_join_nets(graph.nets, new),
    )


def turn(graph: BlockGraph) -> BlockGraph:
    """Turns all edges round, so that downsets become their complements; the order of blocks is not topological."""
    return dataclasses.replace(graph, edges=frozenset((b, a) for a, b in graph.edges))


def _sum_members(graph: BlockGraph, new: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    members: list[list[int]] = [[] for _ in range(size)]
    for block, target in enumerate(new):
        members[target].extend(graph.members[block])
    return tuple(tuple(sorted(group)) for group in members)


def _sum_by(figures: Sequence[float], new: Sequence[int], size: int) -> list[float]:
    sums: list[float] = [0] * size
    for figure, target in zip(figures, new, strict=True):
        sums[target] += figure
    return sums


def _join_nets(nets: Sequence[tuple[int, float]], new: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Renames the blocks of nets, adds up nets of equal blocks and drops those that cannot cost anything."""
    joined: dict[int, float] = {}
    for net, seconds in nets:
        mask = 0
        for block in bits(net):
            mask |= 1 << new[block]
        if seconds > 0 and mask & (mask - 1):
            joined[mask] = joined.get(mask, 0.0) + seconds
    return tuple(sorted(joined.items()))
