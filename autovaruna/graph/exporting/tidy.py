"""Tidies a graph of torch.export: plain names, no checks, no operations without effect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import OpOverload

aten = torch.ops.aten
PREFIX = "model."
"""What the names of the model's tensors start with in a graph of torch.export."""
_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
}


def tidy(module: fx.GraphModule, input_names: list[str], state: set[str]) -> dict[str, Tensor]:
    """Renames placeholders and attributes, drops checks, and returns the constant tensors by attribute name."""
    for node in list(module.graph.nodes):
        if (node.op == "call_module" and node.target == "_guards_fn") or node.target in _CHECKS:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(lambda node: has_effect(module, node))
    _name_placeholders(module, input_names)
    constants: dict[str, Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        if target in state:
            node.target = target.removeprefix(PREFIX)
        elif isinstance(value := _attribute(module, target), Tensor):
            constants[target] = value.detach()
    return constants


def has_effect(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node changes a tensor in place, itself or in a region that it wraps (``torch.no_grad()``)."""
    if node.is_impure():
        return True
    if isinstance(node.target, OpOverload):  # wraps nothing
        return False
    regions = [arg for arg in node.all_input_nodes if arg.op == "get_attr"]
    inner = [region for arg in regions if isinstance(region := _attribute(module, str(arg.target)), fx.GraphModule)]
    return any(
        has_effect(region, child)
        for region in inner
        for child in region.graph.nodes
        if child.op not in ("placeholder", "output")
    )


def _name_placeholders(module: fx.GraphModule, names: list[str]) -> None:
    placeholders = module.graph.find_nodes(op="placeholder")
    used = {node.name for node in module.graph.nodes if node.op != "placeholder"}
    for node, name in zip(placeholders, names, strict=True):
        node.name = node.target = name if name not in used else f"input_{name}"


def _attribute(module: nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
