"""Takes stages out of a graph.

A stage sees a lone sample as it was traced, as one of two. Operations are called directly."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload, kernel_of, root_of
from autovaruna.graph.lengths import free_value
from autovaruna.graph.opaque.run import OpaqueModule
from autovaruna.graph.operators import NORMS, is_of_batch, reached, run_opaque
from autovaruna.graph.precision import Switch, precision_of
from autovaruna.graph.random import draw
from autovaruna.graph.source_lines import GENERATED
from autovaruna.graph.traced import TracedModel

aten = torch.ops.aten
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")
_numbers = count()


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
