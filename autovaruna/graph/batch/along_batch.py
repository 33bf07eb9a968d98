"""Tells whether an operation runs along the batch, so that its result for a sample depends on the other samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx

from autovaruna.graph.arguments import arguments
from autovaruna.graph.batch.places import are_in_turn
from autovaruna.graph.sizes import Sizes

_BY_DIMENSION = re.compile(
    r"aten\.(_?(log_)?softmax|cumsum_?|cumprod_?|logcumsumexp|cummax|cummin|sort|msort|flip|flipud|roll|fft_\w+)\."
)
_COUNTS_BY_DIMENSION = re.compile(r"aten\.(argsort|topk|kthvalue|cumsum_?|unique_dim|diff)\.")
_COUNTS = re.compile(r"aten\.(bincount|histc|_?unique\w*)\.")
_WINDOWS = re.compile(r"aten\.\w*(pool|upsample_\w+)(1|2|3)d\w*\.")
_CONVOLUTIONS = re.compile(r"aten\.conv(_transpose)?(1|2|3)d\.")
_PICKS = re.compile(
    r"aten\.(index\.Tensor|index_select\.default|gather\.default|"
    r"(index_add|index_copy|index_fill|index_put|index_reduce|scatter|scatter_add|scatter_reduce)_?\.)"
)
_RECURRENT = re.compile(r"aten\.(lstm|gru|rnn_tanh|rnn_relu)\.input")


def runs_along(node: fx.Node, sizes: Sizes) -> bool:
    """Whether the operation of a node goes from sample to sample."""
    name = f"{node.target}."
    if _PICKS.match(name):
        return any(not are_in_turn(index, length, sizes) for index, length in _picked(node) if sizes.grows(length))
    lengths = next((rule(node) for pattern, rule in _RULES if pattern.match(name)), ())
    return any(sizes.grows(length) for length in lengths)


def counts_along(node: fx.Node, sizes: Sizes) -> bool:
    """Whether the operation of a node makes integers or masks of several samples that stay as many as the samples."""
    name = f"{node.target}."
    if _COUNTS.match(name):
        return any(sizes.grows(length) for source in node.all_input_nodes for length in _shape(source))
    if _COUNTS_BY_DIMENSION.match(name):
        return any(sizes.grows(length) for length in _by_dimension(node))
    return runs_along(node, sizes)


def _by_dimension(node: fx.Node) -> Iterable[Any]:
    given = arguments(node)
    shape = _shape(node.args[0])
    dims = given.get("dim", given.get("dims"))
    places = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    if str(node.target).startswith(("aten.msort", "aten.flipud")):
        places = [0]
    return [shape[place] for place in places if shape]


def _last(node: fx.Node) -> Iterable[Any]:
    """Returns the dimensions over which a window moves."""
    found = _WINDOWS.match(f"{node.target}.")
    assert found is not None
    return _shape(node.args[0])[-int(found[2]) :]


def _convolved(node: fx.Node) -> Iterable[Any]:
    kernel = _shape(node.args[1])[2:]
    lengths = _shape(node.args[0])[-len(kernel) :]
    return [length for length, size in zip(lengths, kernel, strict=True) if size > 1]


def _steps(node: fx.Node) -> Iterable[Any]:
    shape = _shape(node.args[0])
    is_second = bool(arguments(node).get("batch_first")) and len(shape) == 3
    return shape[1:2] if is_second else shape[:1]


def _others(node: fx.Node) -> Iterable[Any]:
    """Returns the dimensions over which the norm of each slice is taken."""
    shape = list(_shape(node.args[0]))
    del shape[arguments(node)["dim"]]
    return shape


def _after_channels(node: fx.Node) -> Iterable[Any]:
    return _shape(node.args[0])[2:]


def _keys(node: fx.Node) -> Iterable[Any]:
    return _shape(node.args[1])[-2:-1]


def _picked(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Returns the numbers by which a node picks, each with the length of the dimension."""
    given = arguments(node)
    indices = given.get("indices", given.get("index"))
    pairs = enumerate(indices) if isinstance(indices, list | tuple) else [(given["dim"], indices)]
    shape = _shape(node.args[0])
    return [(index, shape[dim]) for dim, index in pairs if isinstance(index, fx.Node)]


def _shape(argument: Any) -> tuple[Any, ...]:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


_RULES: tuple[tuple[re.Pattern[str], Callable[[fx.Node], Iterable[Any]]], ...] = (
    (_BY_DIMENSION, _by_dimension),
    (_WINDOWS, _last),
    (_CONVOLUTIONS, _convolved),
    (_RECURRENT, _steps),
    (re.compile(r"aten\.renorm_?\."), _others),
    (re.compile(r"aten\.instance_norm\."), _after_channels),
    (re.compile(r"aten\.scaled_dot_product_attention\."), _keys),
)


def in_bags(node: fx.Node) -> str:
    """Says how bags of embeddings begin at places among the indices of the whole batch; empty if they do not."""
    if not str(node.target).startswith(("aten.embedding_bag.", "aten._embedding_bag.")):
        return ""
    seen, waiting = set[fx.Node](), [node.args[2]]
    while waiting:
        each: Any = waiting.pop()
        if each.op == "placeholder":
            return (
                f"{each.name} says where bags begin among the indices of the whole batch (pass indices of the shape "
                f"(batch, most in a bag), filled up with padding_idx, and no offsets) in {node.name}"
            )
        new = {source for source in each.all_input_nodes if isinstance(source.meta.get("val"), Tensor)} - seen
        seen |= new
        waiting += new
    return ""
