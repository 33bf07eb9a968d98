"""Tells whether an operation adds samples up, or averages them: it is tried on a drawn batch and on two parts of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.graph.kept_whole.returned import Join
from autovaruna.graph.sizes import Sizes

_SIZES = (3, 2)
"""Samples of two micro-batches that make up a batch."""
_MOST_ELEMENTS = 1 << 22
_ALLOWED = 1e-3
_HALF = frozenset({torch.float16, torch.bfloat16})


def join_tried(node: fx.Node, sizes: Sizes) -> Join:
    """Returns how an operation of torch's makes one number of those of several samples: a sum, a mean, or neither.

    Args:
        node: The operation, or what is taken out of several results of one.
        sizes: The sizes of the graph.
    """
    made: Any = node.args[0] if node.target is getitem else node
    if not isinstance(made.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in made.target.tags:
        return Join.UNKNOWN
    try:
        whole, one, other = (_result(node, made, sizes, part) for part in range(3))
    except Exception:  # it takes numbers of its own kind, or sizes that only data decide
        return Join.UNKNOWN
    weights = [part / sum(_SIZES) for part in _SIZES]
    if _are_close(whole, weights[0] * one + weights[1] * other):
        return Join.MEAN
    return Join.SUM if _are_close(whole, one + other) else Join.OTHER


def _result(node: fx.Node, made: fx.Node, sizes: Sizes, part: int) -> Tensor:
    """Returns what a node gives for the batch (`part` 0), or for one of its two parts, in double precision."""
    generator = torch.Generator().manual_seed(0)
    num_samples = (sum(_SIZES), *_SIZES)[part]

    def value_of(each: fx.Node) -> Any:
        value = each.meta["val"]
        return _drawn(value, sizes, part, generator) if isinstance(value, Tensor) else sizes.number(value, num_samples)

    target: Any = made.target
    args, kwargs = fx.map_arg((made.args, made.kwargs), value_of)
    found = target(*args, **{name: "cpu" if name == "device" else given for name, given in kwargs.items()})
    if node is not made:
        found = found[node.args[1]]
    return found.double()  # type: ignore[no-any-return]


def _drawn(value: Tensor, sizes: Sizes, part: int, generator: torch.Generator) -> Tensor:
    """Draws the numbers of an argument, the same for each part of the batch; returns those of one part."""
    shape = sizes.shape(value, sum(_SIZES))
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError
    if value.is_floating_point() or value.is_complex():
        dtype = torch.float32 if value.dtype in _HALF else value.dtype
        drawn = torch.randn(shape, generator=generator, dtype=dtype)
    else:
        drawn = torch.randint(2, shape, generator=generator).to(value.dtype)
    dimension = sizes.batch_dimension(value)
    return drawn if dimension is None or part == 0 else _of_part(drawn, dimension, part)


def _of_part(drawn: Tensor, dimension: int, part: int) -> Tensor:
    each: Sequence[int] = [drawn.shape[dimension] // sum(_SIZES) * size for size in _SIZES]
    return drawn.split_with_sizes(each, dimension)[part - 1].clone()


def _are_close(one: Tensor, other: Tensor) -> bool:
    scale = one.abs().max().item() if one.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= _ALLOWED * scale).all())
