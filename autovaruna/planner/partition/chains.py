"""Finds good chains quickly: the best cuts of a few orders of the blocks, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Floats

Order = list[int]


def best_chain(graph: BlockGraph, resources: Resources, num_devices: int) -> tuple[int, ...] | None:
    """Cuts several orders of the blocks in the best way and returns the best of all.

    Returns:
        The growing downsets at which devices end; ``None`` if memory allows none of them.
    """
    found = [(cut_order(graph, order, resources, num_devices), order) for order in topological_orders(graph)]
    (load, ends), order = min(found, key=lambda candidate: candidate[0][0])
    if np.isinf(load):
        return None
    return tuple(sum(1 << block for block in order[:end]) for end in ends)


def cut_order(graph: BlockGraph, order: Order, resources: Resources, num_devices: int) -> tuple[float, list[int]]:
    """Cuts one order into at most `num_devices` runs with the smallest greatest load.

    Returns:
        The load, infinite if memory allows no cut, and the ends of the runs.
    """
    loads = _loads_of_runs(graph, order, resources)
    best = loads[0]
    came_from = []
    for _ in range(num_devices - 1):
        joined = np.maximum(best[:, None], loads)
        came_from.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    end = len(order)
    ends = [end]
    for earlier in reversed(came_from):
        end = int(earlier[end])
        ends.append(end)
    return float(best[-1]), sorted(set(ends) - {0})


def _loads_of_runs(graph: BlockGraph, order: Order, resources: Resources) -> Floats:
    """Returns the load of the run from i up to j, shape (blocks + 1, blocks + 1); infinite where it does not fit."""
    size = len(order)
    sums = np.concatenate([np.zeros((len(resources.use), 1)), resources.use[:, order].cumsum(axis=1)], axis=1)
    cut = _cuts_of_runs(graph, order)
    loads = np.zeros((size + 1, size + 1))
    for use, crossing, is_seconds in zip(sums, resources.crossing, resources.is_seconds, strict=True):
        used = use[None, :] - use[:, None] + crossing * cut
        loads = np.maximum(loads, used if is_seconds else np.where(used <= resources.limit_bytes, 0.0, np.inf))
    backwards = np.tri(size + 1, k=-1, dtype=np.bool_)
    loads[backwards] = np.inf
    np.fill_diagonal(loads, 0.0)
    return loads


def _cuts_of_runs(graph: BlockGraph, order: Order) -> Floats:
    """Returns the seconds of the nets that the run from i up to j cuts, shape (blocks + 1, blocks + 1)."""
    size = len(order)
    place = {block: position for position, block in enumerate(order)}
    change = np.zeros((size + 2, size + 2))
    for net, seconds in graph.nets:
        places = sorted(place[block] for block in bits(net))
        before = -1
        for at in places:  # runs that start after `before`, and no later than `at`, are cut once they go beyond `at`
            change[before + 1, at + 1] += seconds
            change[at + 1, at + 1] -= seconds
            before = at
        change[0, places[-1] + 1] -= seconds  # runs that hold all of it are not
        change[places[0] + 1, places[-1] + 1] += seconds
    cuts: Floats = change.cumsum(axis=0).cumsum(axis=1)[: size + 1, : size + 1]
    return cuts


def topological_orders(graph: BlockGraph) -> list[Order]:
    """Lists topological orders: as numbered, last-ready first, heavy first, and least crossing seconds first."""
    age = [0] * len(graph)
    follows = _Crossing(graph)
    return [
        _topological(graph, lambda block: (block,)),
        _topological(graph, lambda block: (-age[block], block), age),
        _topological(graph, lambda block: (-graph.seconds[block], block)),
        _topological(graph, lambda block: (follows.change(block), -graph.seconds[block], block), follows=follows),
    ]


class _Crossing:
    """Follows which nets a growing downset has open."""

    def __init__(self, graph: BlockGraph) -> None:
        self._nets_of: list[list[int]] = [[] for _ in range(len(graph))]
        self._left = [net.bit_count() for net, _ in graph.nets]
        self._size = list(self._left)
        self._seconds = [seconds for _, seconds in graph.nets]
        for position, (net, _) in enumerate(graph.nets):
            for block in bits(net):
                self._nets_of[block].append(position)

    def change(self, block: int) -> float:
        """Returns by how much the open nets' seconds grow when the block joins."""
        grow = 0.0
        for net in self._nets_of[block]:
            if self._left[net] == self._size[net]:
                grow += self._seconds[net]
            elif self._left[net] == 1:
                grow -= self._seconds[net]
        return grow

    def add(self, block: int) -> None:
        """Lets the block join."""
        for net in self._nets_of[block]:
            self._left[net] -= 1


def _topological(
    graph: BlockGraph,
    rank: Callable[[int], tuple[float, ...]],
    age: list[int] | None = None,
    follows: _Crossing | None = None,
) -> Order:
    """Takes the ready block of least rank, again and again; notes in `age` when a block got ready."""
    waits = [0] * len(graph)
    next_to: list[list[int]] = [[] for _ in range(len(graph))]
    for a, b in graph.edges:
        waits[b] += 1
        next_to[a].append(b)
    ready = {block for block, missing in enumerate(waits) if not missing}
    order: Order = []
    while ready:
        block = min(ready, key=rank)
        ready.remove(block)
        order.append(block)
        if follows is not None:
            follows.add(block)
        for after in next_to[block]:
            waits[after] -= 1
            if not waits[after]:
                ready.add(after)
                if age is not None:
                    age[after] = len(order)
    return order
