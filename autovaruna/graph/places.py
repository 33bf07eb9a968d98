"""Tells whether rows that are picked by number are those of all samples in turn, if the numbers follow from sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.graph.sizes import Sizes

_SIZES = (3, 2)
"""Samples of two micro-batches that make up a batch."""


def are_in_turn(index: fx.Node, length: Any, sizes: Sizes) -> bool:
    """Whether each micro-batch picks, by numbers of its own, what the whole batch picks for its samples.

    Args:
        index: The numbers of the rows; if they follow from more than sizes, nothing is said against them.
        length: How many rows there are to pick from.
        sizes: The sizes of the graph.
    """
    if index.meta["val"].dtype is torch.bool or not _follows_from_sizes(index):
        return True
    first, second = _SIZES
    whole, one, other = (_numbers(index, size, sizes) for size in (first + second, first, second))
    moved = other + sizes.number(length, first)
    grown = [dim for dim in range(whole.dim()) if whole.shape[dim] == one.shape[dim] + other.shape[dim]]
    return not grown or torch.equal(whole, torch.cat([one, moved], grown[0]))


def _follows_from_sizes(index: fx.Node) -> bool:
    waiting, seen = [index], {index}
    while waiting:
        node = waiting.pop()
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
            return False
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        waiting += new
    return True


def _numbers(node: fx.Node, size: int, sizes: Sizes) -> Tensor:
    """Computes what a node, which follows from sizes, gives for a batch of some size."""
    known: dict[fx.Node, Any] = {}

    def value_of(each: fx.Node) -> Any:
        if each not in known:
            value = each.meta.get("val")
            known[each] = computed(each) if isinstance(value, Tensor) else sizes.number(value, size)
        return known[each]

    def computed(each: fx.Node) -> Any:
        target: Any = each.target
        args, kwargs = fx.map_arg((each.args, each.kwargs), value_of)
        return target(*args, **{name: "cpu" if name == "device" else given for name, given in kwargs.items()})

    found: Tensor = value_of(node)
    return found
