"""Takes stages out of a graph, and splits backwards: gradients of inputs at once, those of weights later.

A stage sees a lone sample as it was traced, as one of two. Operations are called directly."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autovaruna._torch import OpOverload, kernel_of, root_of, run_backward
from autovaruna.graph.lengths import free_value
from autovaruna.graph.opaque.run import OpaqueModule
from autovaruna.graph.operators import is_of_batch, reached, run_opaque
from autovaruna.graph.precision import Switch, precision_of
from autovaruna.graph.random import draw
from autovaruna.graph.source_lines import GENERATED
from autovaruna.graph.traced import TracedModel

aten = torch.ops.aten
NORMS = frozenset({aten.batch_norm.default, aten.instance_norm.default})
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")
_numbers = count()
_root = torch.zeros((), requires_grad=True)
_NOT_THE_ARGUMENTS = 5
_CONVOLUTIONS = [getattr(aten, f"conv{kind}{number}d") for kind in ("", "_transpose") for number in (1, 2, 3)]
_BIAS_PLACE: dict[Any, int] = {
    **dict.fromkeys((aten.linear, aten.convolution, *_CONVOLUTIONS), 2),
    **dict.fromkeys((aten.addmm, aten.baddbmm), 0),
    **dict.fromkeys((aten.mm, aten.matmul, aten.bmm, aten.embedding), -1),
}
"""The operations, with the place of the argument that is no reason to defer (its gradient is a sum); -1: none."""
_VIEWS = {
    aten.t, aten.transpose, aten.permute, aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten,
    aten.unflatten, aten.expand, aten.alias, aten.select, aten.slice, aten.narrow, aten.to, aten._to_copy,
}  # fmt: skip


def normalize(operation: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Runs a batch or instance normalisation; a function, since graphs call functions."""
    result = operation(*args, **kwargs)
    if torch.compiler.is_compiling():  # what it makes of the backward asks nobody for an order
        return result
    value: Tensor = args[0]
    if value.shape[0] == 1 and value.dim() in _CHANNELS_LAST and result.requires_grad and not value.is_cuda:
        is_joined = operation is aten.instance_norm.default
        result.register_hook(Tensor.contiguous if is_joined else partial(_with_own_strides, _order_of(value)))  # type: ignore[no-untyped-call]
    return result


def _order_of(tensor: Tensor) -> torch.memory_format | None:
    """Returns in which order one sample lies in memory, whatever the stride of its batch; None: in neither."""
    orders = torch.contiguous_format, _CHANNELS_LAST[tensor.dim()]
    return next((order for order in orders if tensor.is_contiguous(memory_format=order)), None)


def _with_own_strides(order: torch.memory_format | None, gradient: Tensor) -> Tensor | None:
    """Returns a gradient whose memory has another order than the input's, with strides that say so."""
    its = _order_of(gradient)
    if its is order or its is None or order is None:
        return None
    return torch.empty_like(gradient, memory_format=_CHANNELS_LAST[gradient.dim()]).copy_(gradient)


class ArgumentSource(str, Enum):
    """Where an argument of a piece comes from."""

    INPUT = "input"  # the caller's input tensor of that name
    VALUE = "value"  # a tensor made by a block outside the piece
    SIZE = "size"  # a number that follows from the micro-batch size
    OF_BATCH = "of_batch"  # a value of the whole batch, by the name of the call of `of_batch` that stands for it
    PARAMETER = "parameter"
    """A parameter, by first name; one argument for each block that uses it, so that each has its own gradient."""
    BUFFER = "buffer"  # a buffer, by first name; the stage may change it
    CONSTANT = "constant"  # a tensor that is neither parameter nor buffer
    RANDOM = "random"  # the stream that random nodes draw from


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a piece; `block` is the user of a parameter, else -1."""

    source: ArgumentSource
    name: str
    block: int = -1


@dataclass(frozen=True)
class Piece:
    """Blocks as a callable: `module(*arguments)` returns one tensor for each name in `outputs`."""

    module: fx.GraphModule
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]

    def named(self, source: ArgumentSource) -> list[str]:
        """Returns the names of the arguments of one kind, in order."""
        return [argument.name for argument in self.arguments if argument.source is source]


def extract(traced: TracedModel, nodes: Iterable[str], outputs: Sequence[str], *, is_bare: bool = False) -> Piece:
    """Takes the nodes of some blocks out of a traced graph, in the order of one process.

    Repeated nodes come along by themselves, unless it `is_bare`: what it needs of them are then `VALUE` arguments. It
    returns its own nodes, repeated ones, inputs or values that pass through.
    """
    wanted = nodes_of(traced, nodes, {} if is_bare else traced.repeated, outputs)
    return _Extraction(traced).run(wanted, outputs)


def reads(traced: TracedModel, nodes: Iterable[str], outputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the names of the values and of the inputs that a piece would get as arguments; see `extract`."""
    wanted = nodes_of(traced, nodes, traced.repeated, outputs)
    inside = {node.name for node in wanted}
    sources = [source for node in wanted for source in node.all_input_nodes] + [traced.nodes[name] for name in outputs]
    outside = dict.fromkeys(source for source in sources if source.name not in inside and source.op != "get_attr")
    inputs = [node.name for node in outside if node.op == "placeholder"]
    values = [node.name for node in outside if node.op != "placeholder" and not traced.sizes.is_given(node)]
    return values, inputs


def nodes_of(
    traced: TracedModel, nodes: Iterable[str], repeated: Mapping[str, tuple[str, ...]], outputs: Sequence[str]
) -> list[fx.Node]:
    """Returns the nodes of a piece and the repeated ones that it needs, in execution order."""

    def needed(node: fx.Node) -> list[fx.Node]:
        together = [traced.nodes[name] for name in repeated.get(node.name, (node.name,))]
        sources = [source for each in together for source in each.all_input_nodes]
        return together + [source for source in sources if source.name in repeated]

    starts = [*nodes, *(name for name in outputs if name in repeated)]
    wanted = reached((traced.nodes[name] for name in starts), needed)
    return sorted(wanted, key=lambda node: traced.places[node.name])


class _Extraction:
    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.graph = fx.Graph()
        self.arguments: dict[Argument, fx.Node] = {}
        self.copies: dict[str, fx.Node] = {}
        self.kept: dict[str, OpaqueModule] = {}

    def run(self, nodes: Iterable[fx.Node], outputs: Sequence[str]) -> Piece:
        switch = Switch(self.graph)
        for node in nodes:
            switch.to(precision_of(node))
            self.copies[node.name] = self._copy(node)
        switch.to(())
        self.graph.output(tuple(self._resolve(self.traced.nodes[name], -1) for name in outputs))
        for node in reversed(self.arguments.values()):  # placeholders first, in the order of the arguments
            root_of(self.graph).append(node)
        module = fx.GraphModule(self.kept, self.graph)
        return Piece(module, tuple(self.arguments), tuple(outputs))

    def _copy(self, node: fx.Node) -> fx.Node:
        block = self.traced.block_of.get(node.name, -1)
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda source: self._kept(source, node, self._resolve(source, block))
        )
        operation: Any = node.target
        if operation in NORMS and self.traced.facts[node.name].needs_gradient:
            return self.graph.create_node(node.op, normalize, (operation, *args), kwargs, node.name)
        if not self.traced.facts[node.name].is_random:
            return self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        stream = self._argument(Argument(ArgumentSource.RANDOM, "stream"))
        if operation is run_opaque:
            operation, args = args[0], args[1:]
        return self.graph.call_function(draw, (stream, self.traced.places[node.name], operation, *args), kwargs)

    def _resolve(self, node: fx.Node, block: int) -> Any:
        """Returns what stands for a node of the traced graph inside the piece."""
        if node.name in self.copies:
            return self.copies[node.name]
        if node.op == "get_attr":
            return self._attribute(node, block)
        if node.op == "placeholder":
            return self._argument(Argument(ArgumentSource.INPUT, node.name))
        if is_of_batch(node):
            return self._argument(Argument(ArgumentSource.OF_BATCH, node.name))
        if self.traced.sizes.is_given(node):
            value = free_value(node)
            is_symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            return self._argument(Argument(ArgumentSource.SIZE, node.name)) if is_symbolic else value
        return self._argument(Argument(ArgumentSource.VALUE, node.name))

    def _attribute(self, node: fx.Node, block: int) -> fx.Node:
        name = str(node.target)
        if name in self.traced.parameters:
            user = block if self.traced.facts[node.name].needs_gradient else -1
            return self._argument(Argument(ArgumentSource.PARAMETER, self.traced.parameters[name], user))
        if name in self.traced.buffers:
            return self._argument(Argument(ArgumentSource.BUFFER, self.traced.buffers[name]))
        if name in self.traced.constants:
            return self._argument(Argument(ArgumentSource.CONSTANT, name))
        self.kept[name] = getattr(self.traced.module, name)
        return self.graph.get_attr(name)

    def _kept(self, source: fx.Node, user: fx.Node, copied: Any) -> Any:
        """Returns a copy of state that forward changes, where autograd may keep it: the next micro-batch changes it."""
        fact = self.traced.facts[user.name]
        memory = self.traced.facts[source.name].makes & self.traced.changed_storages
        if not memory or not fact.needs_gradient or (fact.makes | fact.writes) & memory:
            return copied
        return self.graph.call_function(torch.ops.aten.clone.default, (copied,))

    def _argument(self, argument: Argument) -> fx.Node:
        if argument not in self.arguments:
            suffix = f"_{argument.block}" if argument.block >= 0 else ""
            name = re.sub(r"\W", "_", f"{argument.source.value}_{argument.name}{suffix}")
            self.arguments[argument] = self.graph.placeholder(name)
        return self.arguments[argument]


def direct(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns what runs a graph as its ``forward`` does, line by line the same: errors name the same nodes."""
    code = module.graph.python_code("self")
    called: dict[str, Any] = {}

    def bare(match: re.Match[str]) -> str:
        name = match[0].replace(".", "_")
        operation = getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3])
        if type(operation) is not OpOverload:
            return match[0]
        called[name] = kernel_of(operation)
        return name

    source = _OPERATION.sub(bare, code.src)
    file = f"{GENERATED}.direct_{next(_numbers)}"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {**code.globals, **called}
    exec(compile(source, file, "exec"), names)
    return MethodType(names["forward"], module)


class Deferred:
    """The weight gradients of one micro-batch that are still to be computed."""

    def __init__(self) -> None:
        self._edges: list[GradientEdge] = []
        self._gradients: list[Tensor] = []

    def add(self, edge: GradientEdge, gradient: Tensor) -> None:
        """Records an operation by the edge of its result, and the gradient that came in there."""
        self._edges.append(edge)
        self._gradients.append(gradient)

    def compute(self, weights: Sequence[Tensor], *, is_last: bool = True) -> None:
        """Computes the gradients and adds them to those of the weights; graphs are released if this `is_last`."""
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

    `weights` are the places of arguments that are weights, or views and casts of them.
    """
    hidden = tuple((place, args[place]) for place in weights)
    visible = [None if place in weights else value for place, value in enumerate(args)]
    return _Deferring.apply(deferred, operation, hidden, kwargs, _root, *visible)  # type: ignore[no-untyped-call]


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


@dataclass(frozen=True)
class SplitPiece:
    """A piece whose backward can be run in two parts; `run` takes a `Deferred` and the piece's arguments."""

    run: Callable[..., Any]
    weights: tuple[Argument, ...]
    num_operations: int


def split_backward(piece: Piece) -> SplitPiece | None:
    """Returns a piece whose backward leaves weight gradients for later; None: it has none that can be left."""
    placeholders = piece.module.graph.find_nodes(op="placeholder")
    parameters = {
        node: argument
        for node, argument in zip(placeholders, piece.arguments, strict=True)
        if argument.source is ArgumentSource.PARAMETER and argument.block >= 0
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
    places = [place for place, value in enumerate(node.args) if isinstance(value, fx.Node) and value in weights]
    return places not in ([], [bias])


def _rewritten(graph: fx.Graph, weights: set[fx.Node], operations: set[fx.Node]) -> fx.Graph:
    made = fx.Graph()
    deferred = made.placeholder("deferred")
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in operations:
            copies[node] = made.node_copy(node, copies.__getitem__)
            continue
        places = tuple(k for k, value in enumerate(node.args) if isinstance(value, fx.Node) and value in weights)
        given: tuple[Any, ...] = fx.map_arg(node.args, copies.__getitem__)
        args = (deferred, node.target, places, *given)
        copies[node] = made.create_node("call_function", defer, args, dict(node.kwargs), node.name)
    return made


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None
