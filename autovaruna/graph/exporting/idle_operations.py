"""Takes out operations that return their argument itself: PyTorch runs none of them, and has no backward for them.

These are slices of a whole dimension, for torch.export records each ``:`` of ``x[:, a:b]``, dropout that drops nothing,
and casts to the dtype that is there. If they stayed, a tensor would have two names, be sent twice where a cut lies, and
its gradients be added up in another order than plain PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload

aten = torch.ops.aten
_NO_END = 2**63 - 1


def drop_idle(module: fx.GraphModule) -> None:
    """Puts its argument in the place of each operation that returns it, in regions (``torch.no_grad()``) as well."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for operation, is_idle in _IDLE.items():
                for node in part.graph.find_nodes(op="call_function", target=operation):
                    if is_idle(*node.args, **node.kwargs):
                        node.replace_all_uses_with(node.args[0])
                        part.graph.erase_node(node)


def _is_whole(source: fx.Node, dim: int = 0, start: object = None, end: object = None, step: object = 1) -> bool:
    """Whether a slice takes all."""
    if start not in (None, 0) or step != 1:
        return False
    if end is None or end == _NO_END:
        return True
    value = source.meta.get("val")
    size = value.shape[dim] if isinstance(value, Tensor) else None
    return isinstance(size, int) and size == end  # of a size that varies with the batch, nothing is asked


def _drops_nothing(source: fx.Node, p: float, train: bool) -> bool:
    """Whether a dropout keeps everything."""
    return p == 0 or not train


def _is_there(source: fx.Node, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False) -> bool:
    """Whether a cast without more wishes is to the dtype that a tensor has."""
    value = source.meta.get("val")
    return not copy and isinstance(value, Tensor) and value.dtype == dtype


_DROPOUTS = (aten.dropout, aten.alpha_dropout, aten.feature_dropout, aten.feature_alpha_dropout)
_IDLE: dict[OpOverload, Callable[..., bool]] = {
    aten.slice.Tensor: _is_whole,
    **{dropout.default: _drops_nothing for dropout in _DROPOUTS},
    aten.to.dtype: _is_there,
}
