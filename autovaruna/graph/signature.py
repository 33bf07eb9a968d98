"""Describes what nodes do as a text that is equal for nodes of any model that do the same work on the same tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from autovaruna._torch import OpOverload
from autovaruna.graph.facts import Fact
from autovaruna.graph.precision import precision_of
from autovaruna.graph.sizes import Sizes

_SYMBOL = re.compile(r"\b[suz]\d+\b")
_DEVICE = re.compile(r"device\(type='\w+'(?:, index=\d+)?\)")


def signature(nodes: Sequence[fx.Node], facts: Mapping[str, Fact], sizes: Sizes) -> str:
    """Returns a digest of operations, arguments, wiring, and of what comes in and goes out.

    Of a tensor that comes in it holds the shape (the batch size as a symbol), strides, dtype and whether it needs a
    gradient; of one that goes out, whether it needs a gradient. It holds no names and no device.

    Args:
        nodes: The nodes, in execution order.
        facts: What is known of each node.
        sizes: Says which symbol is the batch size.
    """
    names = {node: f"%{index}" for index, node in enumerate(nodes)}
    outside: dict[fx.Node, str] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in names and source not in outside:
                outside[source] = f"${len(outside)} {_incoming(source, facts)}"
    every = names | outside
    lines = [f"{_described(node)} {fx.map_arg((node.args, node.kwargs), every.__getitem__)}" for node in nodes]
    leaving = [node for node in nodes if any(user not in names for user in node.users)]
    outputs = [f"{names[node]} {facts[node.name].needs_gradient}" for node in leaving]
    text = _DEVICE.sub("device", "\n".join([*lines, *outputs]))
    return hashlib.sha256(_plain(text, str(sizes.symbol)).encode()).hexdigest()[:16]


def _incoming(node: fx.Node, facts: Mapping[str, Fact]) -> str:
    fact = facts.get(node.name)
    value = node.meta.get("val", fact.value if fact else None)
    if fact is not None and not isinstance(value, Tensor):
        value = fact.value if isinstance(fact.value, Tensor | fx.GraphModule) else value
    if isinstance(value, Tensor):
        needs_gradient = fact.value.requires_grad if fact else value.requires_grad
        return f"{node.op}{tuple(value.shape)}{value.stride()}{value.dtype}{needs_gradient}"
    if isinstance(value, fx.GraphModule):
        return "\n".join(str(each.code) for each in value.modules() if isinstance(each, fx.GraphModule))
    return repr(value)


def _described(node: fx.Node) -> str:
    return " ".join([_operation(node.target), *map(str, precision_of(node))])


def _precision(node: fx.Node) -> str:
    """Returns the autocasts under which a node runs."""
    return "".join(f" {each}" for each in node.meta.get("precision", ()))


def _operation(target: Any) -> str:
    if isinstance(target, str | OpOverload) or not hasattr(target, "__qualname__"):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _plain(text: str, batch: str) -> str:
    """Returns the text with the names of symbols, which torch counts up, replaced by their order in it."""
    names = {batch: "batch"}
    return _SYMBOL.sub(lambda match: names.setdefault(match[0], f"size{len(names)}"), text)
