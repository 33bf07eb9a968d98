"""Joins what a stage received to autograd, and runs backward through it.

A received tensor becomes a view of a leaf that notes its gradient and accumulates none. A leaf that accumulates would
do the same, but autograd copies a gradient into ``.grad`` when somebody else holds it, or when its strides are not the
leaf's: a copy of every message, and other last bits in the stage before. No operation writes into what it received
(`graph/grouping.py`), which autograd would refuse of a view of a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.autograd import Variable


def arrive(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """Returns a tensor that shares the memory of `tensor`, and whose gradient is noted in ``gradients[name]``."""
    leaf = tensor.detach().requires_grad_()
    leaf._backward_hooks = {0: partial(gradients.__setitem__, name)}
    arrived = leaf[...]
    leaf.requires_grad_(False)  # from here on autograd only calls the hook
    return arrived


def go_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], is_kept: bool = False) -> None:
    """Runs backward as ``torch.autograd.backward``, whose checks take as long as a small stage computes."""
    for root, gradient in zip(roots, gradients, strict=True):
        assert root.shape == gradient.shape, f"gradient of shape {gradient.shape} for a tensor of shape {root.shape}"
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), is_kept, False, (), allow_unreachable=True, accumulate_grad=True
    )
