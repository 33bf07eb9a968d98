"""Tells whether rows that are picked by number are those of all samples in turn.

Numbers that follow from sizes, inputs and random numbers are computed for a whole batch and for two parts of it. Those
that a model finds itself (the places of what is largest, or sorted) name rows of the micro-batch that it has: nothing
is said of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.graph.sizes import Sizes

_SIZES = (3, 2)
"""Samples of two micro-batches that make up a batch."""
_FIND_PLACES = re.compile(r"aten\.\w*(sort|topk|nonzero|argmax|argmin|unique\w*|searchsorted|bucketize|cumsum)\w*\.")

_COUNT = ("aten.arange.", "aten.range.", "aten.linspace.", "aten.logspace.", "aten.cumsum.", "aten.cumprod.")

TAKE_ROWS = frozenset(
    {
        *("index", "index_select", "gather", "embedding", "take_along_dim", "index_put", "index_put_", "index_add"),
        *(
            "index_add_",
            "index_copy",
            "index_copy_",
            "scatter",
            "scatter_",
            "scatter_add",
            "scatter_add_",
            "embedding_bag",
        ),
    }
)
"""Operations for which numbers of samples may be places."""


def are_in_turn(index: fx.Node, length: Any, sizes: Sizes) -> bool:
    """Whether each micro-batch picks, by numbers of its own, what the whole batch picks for its samples.

    Args:
        index: The numbers of the rows; nothing is said against those that follow from weights, or were found.
        length: How many rows there are to pick from.
        sizes: The sizes of the graph.
    """
    made_of = _sources(index)
    if index.meta["val"].dtype is torch.bool or any(map(_is_found, made_of)):
        return True
    return _are_alike(index, made_of, length, sizes)


def _are_alike(index: fx.Node, made_of: Sequence[fx.Node], length: Any, sizes: Sizes) -> bool:
    """Whether the numbers of two parts of a batch, one after the other, are those of all of it."""
    try:
        whole, one, other = _of_parts(index, made_of, sizes)
    except Exception:  # they may have to be other numbers
        return True
    moved = other + sizes.number(length, _SIZES[0])
    grown = [dim for dim in range(whole.dim()) if whole.shape[dim] == one.shape[dim] + other.shape[dim]]
    return not grown or torch.equal(whole, torch.cat([one, moved], grown[0]))


def follows_place(numbers: fx.Node, sizes: Sizes) -> bool:
    """Whether numbers for samples that follow from sizes alone are others in micro-batches: they count the samples.

    Args:
        numbers: The numbers, which have nothing of the samples.
        sizes: The sizes of the graph.
    """
    made_of = _sources(numbers)
    counts = (each for each in made_of if str(each.target).startswith(_COUNT))
    return any(map(sizes.has_samples, counts)) and not _are_alike(numbers, made_of, 0, sizes)


def _sources(index: fx.Node) -> list[fx.Node]:
    """Returns the tensors that numbers are made of, themselves among them."""
    waiting, seen = [index], {index: None}
    while waiting:
        node = waiting.pop()
        sources = [] if _is_given(node) else node.all_input_nodes
        new = [each for each in sources if each not in seen and isinstance(each.meta.get("val"), Tensor)]
        seen.update(dict.fromkeys(new))
        waiting += new
    return list(seen)


def _is_found(node: fx.Node) -> bool:
    if _is_given(node):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or bool(_FIND_PLACES.match(f"{node.target}."))


def _is_given(node: fx.Node) -> bool:
    """Whether a node is an input, or draws random numbers."""
    if node.op == "placeholder":
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _of_parts(index: fx.Node, made_of: Sequence[fx.Node], sizes: Sizes) -> list[Tensor]:
    """Computes numbers for a whole batch and its two parts."""
    generator = torch.Generator().manual_seed(0)
    first, second = _SIZES
    whole, one, other = inputs = [dict[fx.Node, Any]() for _ in range(3)]
    for node in filter(_is_given, made_of):
        value = node.meta["val"]
        drawn = torch.randint(2, sizes.shape(value, first + second), generator=generator).to(value.dtype)
        whole[node], one[node], other[node] = drawn, drawn, drawn
        if value.dim() and sizes.grows(value.shape[0]):
            one[node], other[node] = drawn.split_with_sizes(_SIZES)
    return [_numbers(index, size, sizes, known) for size, known in zip((first + second, *_SIZES), inputs, strict=True)]


def _numbers(node: fx.Node, size: int, sizes: Sizes, known: dict[fx.Node, Any]) -> Tensor:
    """Computes what a node gives for a batch of some size; `known` has what is given."""

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
