"""Runs normalisations of a single sample, whose backward torch computes wrongly on the CPU for some orders of memory.

Its kernel asks each tensor alone whether channels come last. A batch of one may have any stride, and where that fits no
such order, the answer is no: then the kernel reads input and gradient in different orders (seen in torch 2.13, for
images and volumes of any dtype). Instance normalisation makes one dimension of batch and channels, and so always hides
the order of one sample. Micro-batches of one sample meet this where the whole batch does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_NORMS = frozenset({aten.batch_norm.default, aten.instance_norm.default})
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_norm(node: fx.Node) -> bool:
    """Whether a node of a graph is to run by `normalize`, if it needs a gradient."""
    return node.target in _NORMS


def normalize(operation: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Runs a batch or instance normalisation; a function, since graphs call functions.

    Args:
        operation: The operation.
        *args: Its arguments.
        **kwargs: More arguments.
    """
    result = operation(*args, **kwargs)
    if torch.compiler.is_compiling():  # what it makes of the backward asks nobody for an order
        return result
    value: Tensor = args[0]
    if value.shape[0] == 1 and value.dim() in _CHANNELS_LAST and result.requires_grad and not value.is_cuda:
        is_joined = operation is aten.instance_norm.default
        result.register_hook(_in_rows if is_joined else partial(_told_apart, order_of(value)))  # type: ignore[no-untyped-call]
    return result


def order_of(tensor: Tensor) -> torch.memory_format | None:
    """Returns in which order one sample lies in memory, whatever the stride of its batch; None: in neither."""
    orders = torch.contiguous_format, _CHANNELS_LAST[tensor.dim()]
    return next((order for order in orders if tensor.is_contiguous(memory_format=order)), None)


def _in_rows(gradient: Tensor) -> Tensor | None:
    return gradient.contiguous()


def _told_apart(order: torch.memory_format | None, gradient: Tensor) -> Tensor | None:
    """Returns a gradient of another order than the input's with strides that say so."""
    its = order_of(gradient)
    if its is order or its is None or order is None:
        return None
    return torch.empty_like(gradient, memory_format=_CHANNELS_LAST[gradient.dim()]).copy_(gradient)
