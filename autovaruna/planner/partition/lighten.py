"""Searches graphs in which small blocks weigh nothing, where a memory limit keeps apart what would be joined.

Rule "light" of `contract` moves no block that has bytes, so under a memory limit many downsets stay that would not
matter without it. Leave out the bytes of all blocks up to some size, and join by the rule. Every plan that fits still
fits, so a bound on the chains of these blocks holds for the problem. With all bytes counted again, their chains are
plans of the problem. Often both meet, since most blocks that the rule joins are together in some best plan anyway.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.bounds import Bounds
from autovaruna.planner.partition.close_in import close_in
from autovaruna.planner.partition.contract import contract
from autovaruna.planner.partition.lattice import list_downsets
from autovaruna.planner.partition.loose import without_loose

_log = logging.getLogger(__name__)
_EFFORTS = (1_000, 20_000, 200_000)
_PROOF = "all downsets were searched, without the bytes of small blocks"


def search_lightened(graph: BlockGraph, bounds: Bounds, max_downsets: int) -> None:
    """Searches with the bytes of as many blocks as the number of downsets allows, few downsets and then more.

    Args:
        graph: the blocks, joined by no rule that memory forbids.
        bounds: what is known; updated.
        max_downsets: no search is begun with more downsets.
    """
    sizes = sorted(set(graph.num_bytes) - {0})
    for effort in _EFFORTS:
        if not sizes or bounds.is_closed or bounds.is_late:
            return
        most = min(effort, max_downsets)
        size = _least_left_out(graph, bounds, sizes, most)
        if size is not None:
            _search(lighten(graph, bounds, size), bounds, most)
            sizes = [smaller for smaller in sizes if smaller < size]


def _search(lighter: BlockGraph, bounds: Bounds, most: int) -> None:
    """Looks for plans made of these blocks, and for a bound."""
    weighed = weigh_again(lighter, bounds)
    for graph, proof in ((weighed, None), (lighter, _PROOF)):
        if not bounds.is_closed and not bounds.is_late:
            smaller, loose = without_loose(graph, bounds.problem.border)
            close_in(smaller, bounds, proof, most, loose)


def _least_left_out(graph: BlockGraph, bounds: Bounds, sizes: Sequence[int], most: int) -> int | None:
    """Returns the least of some ascending sizes up to which bytes are left out; ``None`` if none does."""
    low, high = 0, len(sizes)
    while low < high and not bounds.is_late:
        middle = (low + high) // 2
        smaller, _ = without_loose(lighten(graph, bounds, sizes[middle]), bounds.problem.border)
        is_narrow = list_downsets(smaller, most, bounds.deadline) is not None
        low, high = (low, middle) if is_narrow else (middle + 1, high)
    return sizes[high] if high < len(sizes) else None


def lighten(graph: BlockGraph, bounds: Bounds, most_bytes: int) -> BlockGraph:
    """Leaves out the bytes of blocks up to `most_bytes`, and joins by the rules for plans better than the best."""
    num_bytes = tuple(size if size > most_bytes else 0 for size in graph.num_bytes)
    light = dataclasses.replace(graph, num_bytes=num_bytes)
    return contract(light, bounds.problem.border, True, bounds.target)


def weigh_again(graph: BlockGraph, bounds: Bounds) -> BlockGraph:
    """Counts all bytes again."""
    sizes = [sum(bounds.problem.nodes[position].num_bytes for position in members) for members in graph.members]
    return dataclasses.replace(graph, num_bytes=tuple(sizes))
