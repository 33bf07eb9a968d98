"""Joins stages and steps to autograd: what a stage receives, and what a call returns to its caller.

What `model(...)` returns is the output of one autograd function of this rank's parameters and of inputs that need a
gradient. So ``loss.backward()`` accumulates into ``.grad``, fires hooks, and scales by the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import SingleLevelFunction, is_graph_kept, run_engine, set_backward_hook, version_of
from autovaruna.errors import OrderError
from autovaruna.graph.operators import reached
from autovaruna.interception.modules import own_code


def arrive(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """Returns a tensor that shares the memory of `tensor`, and whose gradient is noted in ``gradients[name]``.

    A leaf that accumulates would copy a gradient into ``.grad`` when somebody else holds it, or when its strides are
    not the leaf's: a copy of every message, and other last bits in the stage before. No operation writes into what it
    received (`graph/grouping.py`), which autograd would refuse of a view of a leaf.
    """
    leaf = tensor.detach().requires_grad_()
    set_backward_hook(leaf, partial(gradients.__setitem__, name))
    arrived = leaf[...]
    leaf.requires_grad_(False)  # from here on autograd only calls the hook
    return arrived


def go_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], retains_graph: bool = False) -> None:
    """Runs backward as ``torch.autograd.backward``, whose checks take as long as a small stage computes."""
    for root, gradient in zip(roots, gradients, strict=True):
        assert root.shape == gradient.shape, f"gradient of shape {gradient.shape} for a tensor of shape {root.shape}"
    run_engine(tuple(roots), tuple(gradients), retains_graph, False, (), allow_unreachable=True, accumulate_grad=True)


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
                "backward without it; compute a penalty on gradients in a submodule of the model, which is kept whole."
            )
        finish, retains_graph = ctx.finish, bool(is_graph_kept())
        if finish is None:
            raise OrderError(
                "Backward through the same step a second time: its gradients have been given out. Call the model "
                "again, or pass retain_graph=True to every backward but the last."
            )
        if not retains_graph:
            ctx.finish = None
        with own_code():
            return None, None, None, None, *finish(gradients, retains_graph)


def follows_a_call(tensor: Tensor) -> bool:
    """Whether a tensor was made from what a call of a model returned, so that a backward goes on into that call."""

    def sources(node: Any) -> list[Any]:
        return [] if node is None else [source for source, _ in node.next_functions]

    return any(getattr(node, "_forward_cls", None) is _Published for node in reached([tensor.grad_fn], sources))


def publish(
    outputs: Sequence[Tensor], carries: Sequence[bool], sources: Sequence[Tensor], finish: Finish
) -> list[Tensor]:
    """Returns `outputs` as results of an autograd function of `sources`, which get gradients.

    A backward may start from those that carry one; it calls `finish`, once more after each that keeps the graph.
    """
    root = torch.zeros((), requires_grad=True)  # a rank without parameters takes part in backward, too
    return list(_Published.apply(finish, tuple(outputs), tuple(carries), root, *sources))  # type: ignore[attr-defined]


def while_unchanged(finish: Finish, held: Mapping[str, Tensor], saved: Collection[str]) -> Finish:
    """Returns `finish`, for as long as nothing changes in place what this rank holds of the saved weights."""
    weights = {name: held[name] for name in saved if name in held}
    versions = {name: version_of(weight) for name, weight in weights.items()}

    def checked(gradients: Gradients, retains_graph: bool) -> Gradients:
        changed = [name for name, weight in weights.items() if version_of(weight) != versions[name]]
        if changed:
            raise OrderError(
                f"A backward after weights have changed: got other numbers in {sorted(changed)[0]} than the call of "
                "the model had, whose gradients need those (an optimizer has stepped, say). Expected all backwards of "
                "a call before that; go backward first, or call the model again."
            )
        return finish(gradients, retains_graph)

    return checked
