"""Knows what operations do that their schemas do not say, also in a region that a node wraps.

A normalisation in training changes its running statistics; a dropout that is off draws nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autovaruna._torch import OpOverload
from autovaruna.graph.kept_whole.kept import run_kept

aten = torch.ops.aten
_RUNNING_STATISTICS: dict[Any, tuple[int, int, int]] = {
    aten.batch_norm.default: (3, 4, 5),
    aten.instance_norm.default: (3, 4, 5),
}
_DROP_PROBABILITY: dict[Any, tuple[int, int | None]] = {
    aten.dropout.default: (1, 2),
    aten.scaled_dot_product_attention.default: (4, None),
}


def changed_statistics(module: nn.Module, node: fx.Node) -> list[fx.Node]:
    """Returns the running statistics that a node changes, itself or in a region that it wraps."""
    places = _RUNNING_STATISTICS.get(node.target)
    if places is not None:
        buffers = [node.args[place] for place in places[:2]] if node.args[places[2]] else []
        return [each for each in buffers if isinstance(each, fx.Node)]
    if isinstance(node.target, OpOverload):  # wraps nothing
        return []
    found: list[fx.Node] = []
    for place, argument in enumerate(node.args):
        region = getattr(module, str(argument.target), None) if isinstance(argument, fx.Node) else None
        if isinstance(region, fx.GraphModule):
            given = zip(region.graph.find_nodes(op="placeholder"), node.args[place + 1 :], strict=False)
            outside = {inner: outer for inner, outer in given if isinstance(outer, fx.Node)}
            changed = [each for child in region.graph.nodes for each in changed_statistics(region, child)]
            found += [outside[each] for each in changed if each in outside]
    return found


def is_random(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node draws random numbers, itself or in a region that it wraps."""
    if node.op != "call_function":
        return False
    if node.target is run_kept:
        return True
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags and not _draws_nothing(node)
    regions = [getattr(module, str(arg.target), None) for arg in node.all_input_nodes if arg.op == "get_attr"]
    inner = [region for region in regions if isinstance(region, fx.GraphModule)]
    return any(is_random(region, child) for region in inner for child in region.graph.nodes)


def _draws_nothing(node: fx.Node) -> bool:
    """Whether a dropout is off: its probability is zero, or it is not training."""
    places = _DROP_PROBABILITY.get(node.target)
    if places is None:
        return False
    probability, training = places
    rate = node.args[probability] if len(node.args) > probability else node.kwargs.get("dropout_p", 0.0)
    return bool(rate == 0.0) or (training is not None and node.args[training] is False)
