"""Runs one stage: binds the arguments of its piece to this rank's parameters and buffers.

Every parameter takes part through a leaf of its own for each block that uses it. The leaf shares the parameter's memory
and collects the gradient of a step outside ``.grad``. A piece may be compiled by torch.compile (`CompiledPiece`); what
differs from call to call stays out of the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import enter_autocast, exit_autocast, mark_static
from autovaruna.errors import InputError
from autovaruna.graph.export.assertions import check
from autovaruna.graph.lengths import free_value
from autovaruna.graph.opaque.run import profiling_mode
from autovaruna.graph.pieces import Argument, ArgumentSource, Piece, direct
from autovaruna.graph.random import RandomStream, draw
from autovaruna.graph.traced import TracedModel
from autovaruna.stage.split import StagePart

ParameterUse = tuple[str, int]  # a parameter's first name and the block that uses it
_OF_MICRO_BATCH = (ArgumentSource.INPUT, ArgumentSource.VALUE, ArgumentSource.OF_BATCH)
Order = tuple[int, ...] | None
"""The dimensions of a tensor from the slowest in memory to the fastest; None: it has no such order."""


class StageModule:
    """One stage on one rank; its leaves collect the gradients of parameters.

    A buffer is found by first name, as it is now: a script may replace one. `size_of` evaluates a size node for a
    micro-batch; `run` runs the piece on its arguments (None: its module does).
    """

    def __init__(
        self,
        part: StagePart,
        parameters: Mapping[str, nn.Parameter],
        buffer: Callable[[str], Tensor],
        constants: Mapping[str, Tensor],
        size_of: Callable[[str, int, tuple[int, ...]], Any],
        run: Callable[..., Sequence[Tensor]] | None = None,
    ) -> None:
        self.part, self.index = part, part.index
        self._run = direct(part.piece.module) if run is None else run
        self._parameters, self._buffer, self._constants, self._size_of = parameters, buffer, constants, size_of
        self.leaves: dict[ParameterUse, Tensor] = {}
        self._bound_buffers: list[tuple[str, Tensor]] = []
        places = list(enumerate(part.piece.arguments))
        self._sizes = [(place, each.name) for place, each in places if each.source is ArgumentSource.SIZE]
        self._values = [(place, each.name) for place, each in places if each.source in _OF_MICRO_BATCH]
        self._streams = [place for place, each in places if each.source is ArgumentSource.RANDOM]
        self.is_random = bool(self._streams)
        self.bind()

    def bind(self) -> None:
        """Makes the leaves share the parameters' present memory (an optimizer or a load may have replaced it)."""
        for name, known in self._bound_buffers:
            got, expected = ((tuple(each.shape), each.dtype, str(each.device)) for each in (self._buffer(name), known))
            if got != expected:
                raise InputError(
                    f"The buffer {name} has been replaced by one of another kind after the first call: got {got}, "
                    f"expected {expected}. Wrap the changed model anew."
                )
        arguments = self.part.piece.arguments
        self._bound: list[Any] = [self._state(argument) for argument in arguments]
        self._bound_buffers = [(name, self._buffer(name)) for name in self.part.piece.named(ArgumentSource.BUFFER)]
        bound = zip(arguments, self._bound, strict=True)
        self._bound_frozen = [
            (each.name, leaf) for each, leaf in bound if each.source is ArgumentSource.PARAMETER and each.block < 0
        ]

    def is_bound(self) -> bool:
        """Whether all parameters still have the memory that is bound, and no buffer has been replaced."""
        leaves = [(name, leaf) for (name, _), leaf in self.leaves.items()]
        for name, known in chain(leaves, self._bound_frozen):
            if known.data_ptr() != self._parameters[name].data_ptr():
                return False
        return all(self._buffer(name) is known for name, known in self._bound_buffers)

    def changed_state(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Returns the parameters and buffers among `names` that this stage uses."""
        named = self.part.piece.named
        buffers = {name: self._buffer(name) for name in named(ArgumentSource.BUFFER) if name in names}
        parameters = [name for name in named(ArgumentSource.PARAMETER) if name in names]
        return buffers | {name: self._parameters[name].detach() for name in parameters}

    def held(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers of the stage by first name, as they are now, and its constants."""
        named = self.part.piece.named
        found = {name: self._constants[name] for name in named(ArgumentSource.CONSTANT)}
        found |= {name: self._buffer(name) for name in named(ArgumentSource.BUFFER)}
        return found | {name: self._parameters[name] for name in named(ArgumentSource.PARAMETER)}

    def run(
        self,
        tensors: Mapping[str, Tensor],
        micro_batch_size: int,
        stream: RandomStream | None,
        lengths: tuple[int, ...] = (),
    ) -> dict[str, Tensor]:
        """Runs the operations of the stage on inputs and received values; returns what it sends and makes, by name.

        Random nodes draw from the stream.
        """
        arguments = self._bound.copy()
        for place, name in self._values:
            arguments[place] = tensors[name]
        for place, name in self._sizes:
            arguments[place] = self._size_of(name, micro_batch_size, lengths)
        for place in self._streams:
            arguments[place] = stream
        return dict(zip(self.part.piece.outputs, self._run(*arguments), strict=True))

    def _state(self, argument: Argument) -> Tensor | None:
        if argument.source is ArgumentSource.PARAMETER:
            return self._leaf(argument)
        if argument.source is ArgumentSource.BUFFER:
            return self._buffer(argument.name)
        return self._constants[argument.name] if argument.source is ArgumentSource.CONSTANT else None

    def _leaf(self, argument: Argument) -> Tensor:
        parameter = self._parameters[argument.name]
        if argument.block < 0:
            return parameter.detach()
        use = (argument.name, argument.block)
        leaf = self.leaves.get(use)
        if leaf is None or leaf.data_ptr() != parameter.data_ptr() or leaf.shape != parameter.shape:
            gradient = None if leaf is None else leaf.grad
            leaf = parameter.detach().requires_grad_()
            leaf.grad = gradient
            self.leaves[use] = leaf
        return leaf


class CompiledPiece:
    """A piece of a graph that torch.compile has been given."""

    def __init__(self, piece: Piece, traced: TracedModel, backend: str) -> None:
        self._uncompiled = _Uncompiled()
        self._module = _prepared(piece.module, self._uncompiled)
        self._run = torch.compile(self._module, backend=backend, dynamic=True)
        self._free = [_free_dimensions(argument, traced) for argument in piece.arguments]

    def __call__(self, *arguments: Any) -> Sequence[Tensor]:
        """Runs the piece; compiles it at the first call, after a run that is not compiled if it is random."""
        given: list[Any] = []
        for argument, free in zip(arguments, self._free, strict=True):
            if isinstance(argument, RandomStream):
                self._uncompiled.stream = argument
            elif isinstance(argument, Tensor):
                mark_static(argument, set(range(argument.dim())) - free)
            given.append(None if isinstance(argument, RandomStream) else argument)
        if self._uncompiled.stream is not None and self._uncompiled.learns:
            copies = [each.clone() if isinstance(each, Tensor) else each for each in given]  # it may change them
            with torch.no_grad(), profiling_mode():
                self._module(*copies)
            self._uncompiled.learns = False
        return self._run(*given)  # type: ignore[no-any-return]


class _Uncompiled:
    """What a piece needs that torch.compile must not see: it would compile again for each other object.

    As long as it `learns`, nothing is compiled: kernels differ in the order of memory that they choose.
    """

    def __init__(self) -> None:
        self.stream: RandomStream | None = None
        self.learns = True
        self.orders: dict[int, tuple[Order, ...]] = {}
        self.entered: list[Any] = []

    def draw(self, nothing: None, node: int, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a random operation on arguments in the order of memory that they have without torch.compile."""
        assert self.stream is not None
        if self.learns:
            self.orders[node] = tuple(map(_order, args))
        ordered = [_ordered(arg, order) for arg, order in zip(args, self.orders[node], strict=True)]
        return self.stream.draw(node, operation, *ordered, **kwargs)

    def enter(self, *autocast: Any) -> None:
        self.entered.append(enter_autocast(*autocast))  # type: ignore[no-untyped-call]

    def leave(self, nothing: None) -> None:
        exit_autocast(self.entered.pop())  # type: ignore[no-untyped-call]


def _prepared(module: fx.GraphModule, uncompiled: _Uncompiled) -> fx.GraphModule:
    """Returns a copy of a module whose random operations and switches of autocast stay out of compilation."""
    plain: dict[Any, Any] = {
        draw: uncompiled.draw,
        check: check,
        enter_autocast: uncompiled.enter,
        exit_autocast: uncompiled.leave,
    }
    disable: Any = torch.compiler.disable
    outside = {each: disable(instead) for each, instead in plain.items()}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in outside:
            node.target = outside[node.target]
    return fx.GraphModule(module, graph)


def _order(value: Any) -> Order:
    """Returns the order of memory of a dense tensor; None: it is not one."""
    if not isinstance(value, Tensor):
        return None
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda place: -strides[place]))
    return order if value.permute(order).is_contiguous() else None


def _ordered(value: Any, order: Order) -> Any:
    """Returns a tensor of the same numbers whose memory is in an order."""
    if order is None or value.permute(order).is_contiguous():
        return value
    back = [order.index(place) for place in range(len(order))]
    return value.permute(order).contiguous().permute(back)


def _free_dimensions(argument: Argument, traced: TracedModel) -> frozenset[int]:
    """Returns the dimensions of a tensor argument that follow from the batch size, or from other lengths that vary."""
    if argument.source not in (ArgumentSource.INPUT, ArgumentSource.VALUE):
        return frozenset()
    value = free_value(traced.nodes[argument.name])
    return frozenset(place for place, length in enumerate(value.shape) if isinstance(length, torch.SymInt))
