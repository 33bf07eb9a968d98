"""Looks into regions: nodes that run a graph of their own without gradients, or with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_GRAPH, _FIRST = 1, 2
"""Places among the arguments: the graph, and the first of what goes into it."""


def inside(module: fx.GraphModule, region: fx.Node) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """Returns the graph of a region, and what is given for each of its inputs."""
    graph: Any = region.args[_GRAPH]
    inner: fx.GraphModule = getattr(module, str(graph.target))
    return inner, dict(zip(inner.graph.find_nodes(op="placeholder"), region.args[_FIRST:], strict=True))
