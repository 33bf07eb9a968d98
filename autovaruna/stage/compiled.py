"""Compiles stages by torch.compile; what differs from call to call stays out of the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import enter_autocast, exit_autocast, mark_static
from autovaruna.graph.export.assertions import check
from autovaruna.graph.lengths import free_value
from autovaruna.graph.opaque.run import profiling_mode
from autovaruna.graph.pieces import Argument, ArgumentSource, Piece
from autovaruna.graph.random import RandomStream, draw
from autovaruna.graph.traced import TracedModel

Order = tuple[int, ...] | None
"""The dimensions of a tensor from the slowest in memory to the fastest; None: it has no such order."""


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
            elif isinstance(argument, Tensor) and not hasattr(argument, "_dynamo_static_indices"):
                for place in set(range(argument.dim())) - free:
                    mark_static(argument, place)
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
