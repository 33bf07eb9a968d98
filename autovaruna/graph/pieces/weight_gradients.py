"""Runs operations whose weight gradients are computed apart from backward, by the kernels that backward would run.

Such an operation runs inside of an autograd function, on inputs that it has detached, and so keeps a small graph of its
own: from its result to its inputs and to its weights. Backward goes through that graph to the inputs alone, and notes
the gradient that it started from. Later the same graphs are gone through to the weights alone, those of a micro-batch
all at once: autograd meets them in the order in which one whole backward would, and adds up in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autovaruna._torch import run_backward

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
