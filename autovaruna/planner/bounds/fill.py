"""Bounds how long a stage waits: the least time before its first forward, and after its last backward.

A stage waits for whole stages, not for blocks. With consecutive stages and relayed values, the stage that starts at
block p waits for the stage that last held what p needs; that is the previous one if the holder is block p - 1, and
then the wait is all the work before p, wherever the cuts are. Where p needs only older values, less is certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from autovaruna.graph.records import Graph, Value
from autovaruna.planner.costs import Array


def fill_seconds(graph: Graph, block_seconds: Array, *, needs_gradient: bool) -> Array:
    """Returns, for each block p, the least seconds of other stages that a stage starting at p waits for.

    Args:
        graph: the graph.
        block_seconds: of each block, forward (or backward, with `needs_gradient`), on the fastest rank.
        needs_gradient: True to follow gradients only: then the wait is that after the stage's last backward.

    Returns:
        ``(num_blocks,)``, valid for every split into consecutive stages, one stage a rank.
    """
    holders = last_holders(graph, (v for v in graph.values if v.needs_gradient or not needs_gradient))
    work = np.concatenate([[0.0], np.cumsum(block_seconds)])
    fill = np.zeros(len(graph.blocks))
    # The stage that holds block h starts at some i <= h, has waited fill[i], and works at least work[h + 1] - work[i].
    slack = np.zeros(len(graph.blocks))
    for p in range(1, len(graph.blocks)):
        holder = holders[p]
        fill[p] = work[holder + 1] + slack[holder] if holder >= 0 else 0.0
        slack[p] = min(slack[p - 1], fill[p] - work[p])
    return fill


def last_holders(graph: Graph, values: Iterable[Value]) -> list[int]:
    """Returns, for each block, the last earlier block that makes or uses a value which it needs; -1: none."""
    holders = [-1] * len(graph.blocks)
    for value in values:
        chain = sorted({value.producer, *value.consumers})
        for before, user in pairwise(chain):
            holders[user] = max(holders[user], before)
    return holders


def producers_of(values: Iterable[Value]) -> dict[int, list[int]]:
    """Returns the blocks whose values each block uses; those that use none are left out."""
    found: dict[int, list[int]] = {}
    for value in values:
        for user in value.consumers:
            found.setdefault(user, []).append(value.producer)
    return found


def longest_path(values: Iterable[Value], block_seconds: Array) -> list[int]:
    """Returns the blocks of the path along values, each block before the next, that takes longest."""
    before = producers_of(values)
    seconds, origin = np.array(block_seconds, dtype=np.float64), [-1] * len(block_seconds)
    for block in range(len(block_seconds)):
        producers = before.get(block)
        if producers:
            origin[block] = max(producers, key=lambda producer: seconds[producer])
            seconds[block] += seconds[origin[block]]
    path = [int(seconds.argmax())]
    while origin[path[-1]] >= 0:
        path.append(origin[path[-1]])
    return path[::-1]
