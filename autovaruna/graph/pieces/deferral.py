"""Splits backwards: gradients of inputs at once, those of weights later, by operations that are called directly."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autovaruna._torch import OpOverload, run_backward
from autovaruna.graph.pieces.extract import Argument, Piece, Source
from autovaruna.graph.source_lines import GENERATED

_OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")
_numbers = count()


def direct(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns what runs a graph as its ``forward`` does, line by line the same: errors name the same nodes."""
    code = module.graph.python_code("self")
    called: dict[str, Any] = {}

    def bare(match: re.Match[str]) -> str:
        name = match[0].replace(".", "_")
        operation = getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3])
        if type(operation) is not OpOverload:
            return match[0]
        called[name] = operation._op
        return name

    source = _OPERATION.sub(bare, code.src)
    file = f"{GENERATED}.direct_{next(_numbers)}"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {**code.globals, **called}
    exec(compile(source, file, "exec"), names)
    return MethodType(names["forward"], module)


_root = torch.zeros((), requires_grad=True)
_NOT_THE_ARGUMENTS = 5


class Deferred:
    """The weight gradients of one micro-batch that are still to be computed."""

    def __init__(self) -> None:
        self._edges: list[GradientEdge] = []
        self._gradients: list[Tensor] = []

    def add(self, edge: GradientEdge, gradient: Tensor) -> None:
        """Notes an operation by the edge of its result, and the gradient that came in there."""
        self._edges.append(edge)
        self._gradients.append(gradient)

    def compute(self, weights: Sequence[Tensor], *, is_last: bool = True) -> None:
        """Computes the gradients and adds them to those of the weights.

        Args:
            weights: The leaves that the operations get their weights from.
            is_last: Whether the graphs are let go of; False to compute them again.
        """
        if self._edges:
            edges, gradients = tuple(self._edges), tuple(self._gradients)
            if is_last:
                self._edges, self._gradients = [], []
            run_backward(
                edges, gradients, not is_last, False, tuple(weights), allow_unreachable=True, accumulate_grad=True
            )

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients that are kept until then."""
        return tuple(self._gradients)


def defer(deferred: Deferred, operation: Callable[..., Any], weights: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Runs an operation whose weight gradients are deferred; a function, since graphs call functions.

    Args:
        deferred: Collects them.
        operation: The operation; it returns one tensor.
        weights: Which of its arguments are weights, or views and casts of them.
        *args: Its arguments.
        **kwargs: More arguments, no tensors among them.
    """
    hidden = tuple((place, args[place]) for place in weights)
    visible = [None if place in weights else value for place, value in enumerate(args)]
    return _Deferring.apply(deferred, operation, hidden, kwargs, _root, *visible)  # type: ignore[no-untyped-call]


def defer_einsum(deferred: Deferred, weights: Sequence[int], equation: str, *operands: Tensor) -> Any:
    """Runs an einsum whose weight gradients are deferred; `weights` count from the equation on."""
    return defer(deferred, _einsum, weights, equation, *operands)


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.einsum.default(equation, operands)
    return result


class _Deferring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        deferred: Deferred,
        operation: Callable[..., Any],
        hidden: Sequence[tuple[int, Tensor]],
        kwargs: Mapping[str, Any],
        root: Tensor,
        *args: Any,
    ) -> Tensor:
        arguments = list(args)
        inputs: list[tuple[int, GradientEdge]] = []
        with torch.enable_grad():
            for place, value in hidden:
                arguments[place] = value
            for place, value in enumerate(args):
                if isinstance(value, Tensor) and value.requires_grad:
                    arguments[place] = _entered(value)
                    inputs.append((place, get_gradient_edge(arguments[place])))
            result: Tensor = operation(*arguments, **kwargs)
            ctx.result = get_gradient_edge(result)  # the edge, not the tensor, whose memory need not last
        ctx.deferred, ctx.inputs, ctx.num_arguments = deferred, inputs, len(args)
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        found: list[Tensor | None] = [None] * (_NOT_THE_ARGUMENTS + ctx.num_arguments)
        if gradient is None:
            return tuple(found)
        if ctx.inputs:
            edges = tuple(edge for _, edge in ctx.inputs)
            gradients = run_backward(
                (ctx.result,), (gradient,), True, False, edges, allow_unreachable=True, accumulate_grad=False
            )
            for (place, _), each in zip(ctx.inputs, gradients, strict=True):
                found[_NOT_THE_ARGUMENTS + place] = each
        ctx.deferred.add(ctx.result, gradient)
        return tuple(found)


class _Entered(torch.autograd.Function):
    """Begins an operation's own graph; nothing goes backward through it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


def _entered(tensor: Tensor) -> Tensor:
    """Returns a tensor on the same memory where an operation's own graph begins.

    Under autocast no leaf: autocast would keep its copy of a leaf till the end of the step, and a leaf's node keeps
    the leaf, of which the operation needs its copy alone.
    """
    if torch.is_autocast_enabled(tensor.device.type):
        entered: Tensor = _Entered.apply(tensor, _root)  # type: ignore[no-untyped-call]
        return entered
    return tensor.detach().requires_grad_()


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
