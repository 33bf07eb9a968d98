"""Improves a plan by searching all chains near it."""

from __future__ import annotations

import math
import time

from autovaruna.planner.partition.blocks import BlockGraph, join_blocks
from autovaruna.planner.partition.bounds import Bounds
from autovaruna.planner.partition.chains import topological_orders
from autovaruna.planner.partition.close_in import close_in

_FEWEST_FREE = 2
_WORTH_MORE = 1e-3


def refine(graph: BlockGraph, bounds: Bounds, max_downsets: int, until: float = math.inf) -> None:
    """Searches chains that move only blocks near the ends of the best plan's devices, while that helps.

    "Near" is by an order of the blocks: the last ones of a device and the first ones of the next. All others of a
    device are joined into one block. As many are left free as `max_downsets` allows.

    Args:
        graph: the blocks.
        bounds: what is known; gains better plans.
        max_downsets: the most downsets of one search.
        until: no search begins after this, on ``time.monotonic``'s clock.
    """
    has_improved = bounds.devices is not None
    while has_improved and not bounds.is_closed and time.monotonic() < min(until, bounds.deadline):
        before = bounds.upper
        for order in topological_orders(graph):
            free = _FEWEST_FREE
            while (
                free < len(graph)
                and time.monotonic() < until
                and close_in(_freeze(graph, bounds, order, free), bounds, None, max_downsets)
            ):
                free *= 2
        has_improved = bounds.upper < before * (1.0 - _WORTH_MORE)


def _freeze(graph: BlockGraph, bounds: Bounds, order: list[int], free: int) -> BlockGraph:
    """Joins the blocks of each device except for `free` at each of its ends."""
    assert bounds.devices is not None
    held: dict[int, list[int]] = {}
    for block in order:
        held.setdefault(bounds.devices[graph.members[block][0]], []).append(block)
    labels = list(range(len(graph)))
    for device, blocks in held.items():
        inner = blocks[0 if device == min(held) else free : len(blocks) if device == max(held) else len(blocks) - free]
        for block in inner:
            labels[block] = inner[0]
    return join_blocks(graph, labels)
