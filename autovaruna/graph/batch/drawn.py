"""Computes parts of a graph for a drawn batch of five samples, and for the micro-batches of three and two that it has.

So it shows what an operator that is not listed makes of several samples, and whether rows that are picked by number are
those of all samples in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload
from autovaruna.graph.batch.operators import Trait, has
from autovaruna.graph.batch.values import reached
from autovaruna.graph.opaque.run import Reduction
from autovaruna.graph.sizes import Sizes

_PARTS = (3, 2)
_ALL = sum(_PARTS)
_MOST_ELEMENTS = 1 << 22
_ALLOWED = 1e-3
_HALF = frozenset({torch.float16, torch.bfloat16})


def join_tried(node: fx.Node, sizes: Sizes) -> Reduction:
    """Returns how an operation of torch's makes one number of those of several samples: a sum, a mean, or neither.

    Args:
        node: The operation, or what is taken out of several results of one.
        sizes: The sizes of the graph.
    """
    made: Any = node.args[0] if node.target is getitem else node
    if not isinstance(made.target, OpOverload) or _is_random(made):
        return Reduction.UNKNOWN
    leaves = [each for each in made.all_input_nodes if isinstance(each.meta["val"], Tensor)]
    try:
        whole, one, other = (each.double() for each in _computed(node, leaves, sizes, is_whole=False))
    except Exception:  # it takes numbers of its own kind, or sizes that only data decide
        return Reduction.UNKNOWN
    if _are_close(whole, (_PARTS[0] * one + _PARTS[1] * other) / _ALL):
        return Reduction.MEAN
    return Reduction.SUM if _are_close(whole, one + other) else Reduction.OTHER


def are_in_turn(index: fx.Node, length: Any, sizes: Sizes) -> bool:
    """Whether each micro-batch picks, by numbers of its own, what the whole batch picks for its samples.

    Args:
        index: The numbers of the rows, which follow from sizes, inputs and random numbers. Nothing is said against
            those that a model finds itself (the places of what is largest, or sorted): they name rows that it has.
        length: How many rows there are to pick from.
        sizes: The sizes of the graph.
    """
    made_of = _sources(index)
    if index.meta["val"].dtype is torch.bool or any(map(_is_found, made_of)):
        return True
    return _are_alike(index, made_of, length, sizes)


def follows_place(numbers: fx.Node, sizes: Sizes) -> bool:
    """Whether numbers for samples that follow from sizes alone are others in micro-batches: they count the samples.

    Args:
        numbers: The numbers, which have nothing of the samples.
        sizes: The sizes of the graph.
    """
    made_of = _sources(numbers)
    counts = (each for each in made_of if has(each, Trait.COUNTS_ON))
    return any(map(sizes.has_samples, counts)) and not _are_alike(numbers, made_of, 0, sizes)


def _are_alike(index: fx.Node, made_of: Sequence[fx.Node], length: Any, sizes: Sizes) -> bool:
    """Whether the numbers of two parts of a batch, one after the other, are those of all of it."""
    try:
        whole, one, other = _computed(index, filter(_is_given, made_of), sizes, is_whole=True)
    except Exception:  # they may have to be other numbers
        return True
    moved = other + sizes.number(length, _PARTS[0])
    grown = [dim for dim in range(whole.dim()) if whole.shape[dim] == one.shape[dim] + other.shape[dim]]
    return not grown or torch.equal(whole, torch.cat([one, moved], grown[0]))


def _sources(index: fx.Node) -> list[fx.Node]:
    """Returns the tensors that numbers are made of, themselves among them."""

    def sources(node: fx.Node) -> list[fx.Node]:
        found = [] if _is_given(node) else node.all_input_nodes
        return [each for each in found if isinstance(each.meta.get("val"), Tensor)]

    return list(reached([index], sources))


def _is_found(node: fx.Node) -> bool:
    if _is_given(node):
        return False
    return not isinstance(node.target, OpOverload) or has(node, Trait.FINDS_PLACES)


def _is_given(node: fx.Node) -> bool:
    """Whether a node is an input, or draws random numbers."""
    return node.op == "placeholder" or _is_random(node)


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _computed(node: fx.Node, leaves: Iterable[fx.Node], sizes: Sizes, is_whole: bool) -> list[Tensor]:
    """Computes what a node gives for the batch and its two parts.

    Args:
        node: The node.
        leaves: The tensors that it is made of for which numbers are drawn.
        sizes: The sizes of the graph.
        is_whole: Whether all numbers are zero or one, as places may be.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = {leaf: _drawn(leaf.meta["val"], sizes, generator, is_whole) for leaf in leaves}
    numbers = (_ALL, *_PARTS)
    return [
        _run(node, num, sizes, {leaf: each[part] for leaf, each in drawn.items()}) for part, num in enumerate(numbers)
    ]


def _drawn(value: Tensor, sizes: Sizes, generator: torch.Generator, is_whole: bool) -> list[Tensor]:
    """Draws the numbers of a tensor for the batch; returns them, and those of the two parts."""
    shape = sizes.shape(value, _ALL)
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError
    if is_whole or not (value.is_floating_point() or value.is_complex()):
        drawn = torch.randint(2, shape, generator=generator).to(value.dtype)
    else:
        dtype = torch.float32 if value.dtype in _HALF else value.dtype
        drawn = torch.randn(shape, generator=generator, dtype=dtype)
    dimension = sizes.batch_dimension(value)
    if dimension is None:
        return [drawn.clone() for _ in range(3)]
    lengths = [shape[dimension] // _ALL * num for num in _PARTS]
    return [drawn, *(part.clone() for part in drawn.split_with_sizes(lengths, dimension))]


def _run(node: fx.Node, num_samples: int, sizes: Sizes, known: dict[fx.Node, Any]) -> Tensor:
    """Computes what a node gives for a batch of some size; `known` has what is drawn."""

    def value_of(each: fx.Node) -> Any:
        if each not in known:
            value = each.meta.get("val")
            is_made = isinstance(value, Tensor | list | tuple)
            known[each] = computed(each) if is_made else sizes.number(value, num_samples)
        return known[each]

    def computed(each: fx.Node) -> Any:
        target: Any = each.target
        args, kwargs = fx.map_arg((each.args, each.kwargs), value_of)
        return target(*args, **{name: "cpu" if name == "device" else given for name, given in kwargs.items()})

    found: Tensor = value_of(node)
    return found


def _are_close(one: Tensor, other: Tensor) -> bool:
    scale = one.abs().max().item() if one.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= _ALLOWED * scale).all())
