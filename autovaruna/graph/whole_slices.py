"""Takes out slices of a whole dimension: torch.export records each ``:`` of ``x[:, a:b]``, PyTorch runs none of them.

Such a slice is its argument, memory and all. But it has a backward, which fills a new tensor with zeros and copies the
gradient into it.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_SLICE = torch.ops.aten.slice.Tensor
_NO_END = 2**63 - 1


def drop_whole_slices(module: fx.GraphModule) -> None:
    """Puts its argument in the place of each slice that is all of it, in regions (``torch.no_grad()``) as well."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=_SLICE):
                if _is_whole(*node.args, **node.kwargs):
                    node.replace_all_uses_with(node.args[0])
                    part.graph.erase_node(node)


def _is_whole(source: fx.Node, dim: int = 0, start: object = None, end: object = None, step: object = 1) -> bool:
    if start not in (None, 0) or step != 1:
        return False
    if end is None or end == _NO_END:
        return True
    value = source.meta.get("val")
    size = value.shape[dim] if isinstance(value, Tensor) else None
    return isinstance(size, int) and size == end  # of a size that varies with the batch, nothing is asked
