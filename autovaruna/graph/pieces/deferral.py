"""Finds the operations of a piece whose weight gradients can be computed apart from backward, and makes them so.

These are products, convolutions and lookups that get a weight straight, or through views and casts. A weight that
anything else uses too stays in backward as a whole: the order of its sum is one of backward's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autovaruna.graph.pieces.direct import direct
from autovaruna.graph.pieces.extract import Argument, Piece, Source
from autovaruna.graph.pieces.weight_gradients import defer, defer_einsum

aten = torch.ops.aten
_BIAS_PLACE: dict[Any, int] = {
    aten.linear: 2,
    aten.conv1d: 2,
    aten.conv2d: 2,
    aten.conv3d: 2,
    aten.conv_transpose1d: 2,
    aten.conv_transpose2d: 2,
    aten.conv_transpose3d: 2,
    aten.convolution: 2,
    aten.addmm: 0,
    aten.baddbmm: 0,
    aten.mm: -1,
    aten.matmul: -1,
    aten.bmm: -1,
    aten.einsum: -1,
    aten.embedding: -1,
}
"""The operations, with the place of the argument that is no reason to defer (its gradient is a sum); -1: none."""
_VIEWS = {
    aten.t, aten.transpose, aten.permute, aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten,
    aten.unflatten, aten.expand, aten.alias, aten.select, aten.slice, aten.narrow, aten.to, aten._to_copy,
}  # fmt: skip


@dataclass(frozen=True)
class SplitPiece:
    """A piece whose backward can be run in two parts.

    Attributes:
        run: called with a `Deferred` and the piece's arguments.
        weights: the arguments whose gradients are deferred.
        num_operations: how many operations defer them.
    """

    run: Callable[..., Any]
    weights: tuple[Argument, ...]
    num_operations: int


def split_backward(piece: Piece) -> SplitPiece | None:
    """Returns a piece whose backward leaves weight gradients for later; None: it has none that can be left."""
    placeholders = piece.module.graph.find_nodes(op="placeholder")
    parameters = {
        node: argument
        for node, argument in zip(placeholders, piece.arguments, strict=True)
        if argument.source is Source.PARAMETER and argument.block >= 0
    }
    weights, operations = _find(piece.module.graph, parameters.keys())
    if not operations:
        return None
    module = fx.GraphModule(piece.module, _rewritten(piece.module.graph, weights, operations))
    used = tuple(argument for node, argument in parameters.items() if node in weights)
    return SplitPiece(direct(module), used, len(operations))


def _find(graph: fx.Graph, parameters: Collection[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Returns the weights, with their views, that only deferring operations use, and these operations."""
    weights = set(parameters)
    for node in graph.nodes:
        if _packet(node) in _VIEWS and len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in weights:
            weights.add(node)
    while True:
        operations = {node for node in graph.nodes if _may_defer(node, weights)}
        kept = {
            node
            for node in weights
            if all(user in weights or user in operations for user in node.users)
            and (node in parameters or node.all_input_nodes[0] in weights)
        }
        if kept == weights:
            return weights, operations
        weights = kept


def _may_defer(node: fx.Node, weights: set[fx.Node]) -> bool:
    if _packet(node) not in _BIAS_PLACE or any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return False
    bias = _BIAS_PLACE[_packet(node)]
    return any(value in weights for place, value in enumerate(_arguments(node)) if place != bias and _is_node(value))


def _rewritten(graph: fx.Graph, weights: set[fx.Node], operations: set[fx.Node]) -> fx.Graph:
    made = fx.Graph()
    deferred = made.placeholder("deferred")
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in operations:
            copies[node] = made.node_copy(node, copies.__getitem__)
            continue
        arguments = _arguments(node)
        places = tuple(k for k, value in enumerate(arguments) if _is_node(value) and value in weights)
        given: tuple[Any, ...] = fx.map_arg(tuple(arguments), copies.__getitem__)
        if _packet(node) is aten.einsum:
            target: Callable[..., Any] = defer_einsum
            args: tuple[Any, ...] = deferred, places, *given
        else:
            target, args = defer, (deferred, node.target, places, *given)
        copies[node] = made.create_node("call_function", target, args, dict(node.kwargs), node.name)
    return made


def _arguments(node: fx.Node) -> list[Any]:
    """Returns the arguments of an operation, the operands of an einsum one by one."""
    if _packet(node) is aten.einsum:
        return [node.args[0], *node.args[1]]  # type: ignore[misc]
    return list(node.args)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)
