"""Joins what a stage received to autograd, and runs backward through it.

A received tensor is the result of an autograd function whose backward notes the gradient. A leaf would do the same, but
autograd copies a gradient into ``.grad`` when somebody else holds it, or when its strides are not the leaf's: a copy of
every message, and other last bits in the stage before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import _SingleLevelFunction

_root = torch.zeros((), requires_grad=True)


class _Arrived(_SingleLevelFunction):
    """Without the layer of `torch.autograd.Function` for torch.func, which takes longer than autograd itself."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradients: dict[str, Tensor], name: str, root: Tensor) -> Tensor:
        ctx.place = gradients, name
        ctx.materialize_grads = False
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        gradients, name = ctx.place
        if gradient is not None:
            gradients[name] = gradient
        return None, None, None, None


def arrive(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """Returns a tensor that shares the memory of `tensor`, and whose gradient is noted in ``gradients[name]``."""
    arrived: Tensor = _Arrived.apply(tensor, gradients, name, _root)  # type: ignore[attr-defined]
    return arrived


def go_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Runs backward as ``torch.autograd.backward``, whose checks take as long as a small stage computes."""
    for root, gradient in zip(roots, gradients, strict=True):
        assert root.shape == gradient.shape, f"gradient of shape {gradient.shape} for a tensor of shape {root.shape}"
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
