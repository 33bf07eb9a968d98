"""Joins a step that has already run (or that runs in backward) to the caller's autograd graph.

What `model(...)` returns is the output of one autograd function whose inputs are the parameters of this rank and the
inputs that need a gradient. So ``loss.backward()`` accumulates into ``.grad``, fires hooks, and scales by the gradient
that comes in, exactly as autograd does for any other function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import SingleLevelFunction, is_graph_kept
from autovaruna.errors import OrderError

Gradients = Sequence[Tensor | None]
Finish = Callable[[Gradients, bool], Gradients]
"""Turns gradients of outputs into those of sources; told whether the caller may go backward again (`retain_graph`)."""


class _Published(SingleLevelFunction):
    """Without the layer of `torch.autograd.Function` for torch.func, which looks at every parameter."""

    @staticmethod
    def forward(ctx: Any, finish: Finish, outputs: Sequence[Tensor], carries: Sequence[bool], *roots: Tensor) -> Any:
        ctx.finish = finish
        ctx.materialize_grads = False
        fresh = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(output for output, carry in zip(fresh, carries, strict=True) if not carry))
        return fresh

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise OrderError(
                "A second derivative of a step: got create_graph=True, but a step computes numbers alone. Expected a "
                "backward without it; compute a penalty on gradients in the model's own forward."
            )
        finish, is_kept = ctx.finish, _is_graph_kept()
        if finish is None:
            raise OrderError(
                "Backward through the same step a second time: its gradients have been given out. Call the model "
                "again, or pass retain_graph=True to every backward but the last."
            )
        if not is_kept:
            ctx.finish = None
        return None, None, None, None, *finish(gradients, is_kept)


def _is_graph_kept() -> bool:
    """Whether the backward that runs now keeps its graph for another one."""
    return bool(is_graph_kept())


def follows_a_call(tensor: Tensor) -> bool:
    """Whether a tensor was made from what a call of a model returned, so that a backward goes on into that call."""
    waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if getattr(node, "_forward_cls", None) is _Published:
            return True
        new = {source for source, _ in node.next_functions} - seen
        seen |= new
        waiting += new
    return False


def publish(
    outputs: Sequence[Tensor], carries: Sequence[bool], sources: Sequence[Tensor], finish: Finish
) -> list[Tensor]:
    """Returns `outputs` as results of an autograd function of `sources`.

    Args:
        outputs: What the call computed.
        carries: Which outputs a backward may start from.
        sources: Parameters and inputs that get gradients.
        finish: Turns the gradients of `outputs` into those of `sources`; called once, and again after each backward
            that keeps the graph.
    """
    root = torch.zeros((), requires_grad=True)  # a rank without parameters takes part in backward, too
    return list(_Published.apply(finish, tuple(outputs), tuple(carries), root, *sources))  # type: ignore[attr-defined]
