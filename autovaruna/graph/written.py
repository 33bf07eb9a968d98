"""Looks at what a graph writes into: buffers may change, arguments are copied before, other tensors must stay."""

from __future__ import annotations

import logging

import torch
from torch import fx, nn

from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.exporting.exported import Exported
from autovaruna.graph.exporting.tidy import PREFIX
from autovaruna.graph.facts import Fact, learn
from autovaruna.graph.said import warn_once

logger = logging.getLogger(__name__)


def learn_written(
    exported: Exported, model: nn.Module, call: CallSpec, batch_size: int, device: torch.device
) -> dict[str, Fact]:
    """Returns what each operation does, by its node's name, once none writes into what is not the graph's to change.

    Raises:
        TraceError: forward writes into a tensor of the model that is no buffer.
    """
    facts = learn(exported, model, call, batch_size, device)
    _refuse_writing(exported, facts, model)
    if _copy_what_is_written(exported, facts, model):
        return learn(exported, model, call, batch_size, device)
    return facts


def changed_state(module: fx.GraphModule, facts: dict[str, Fact], state: dict[str, str]) -> frozenset[str]:
    """Returns the attributes that are parameters and buffers, and that forward changes."""
    written = {storage for fact in facts.values() for storage in fact.writes}
    attributes = module.graph.find_nodes(op="get_attr")
    return frozenset(
        str(node.target) for node in attributes if str(node.target) in state and facts[node.name].makes & written
    )


def _refuse_writing(exported: Exported, facts: dict[str, Fact], model: nn.Module) -> None:
    """Refuses a forward that writes into a tensor of its own that is no buffer: ranks would not share what it holds."""
    written = {storage for fact in facts.values() for storage in fact.writes}
    for node in exported.module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in exported.constants and facts[node.name].makes & written:
            raise TraceError(
                f"forward changes the tensor {name.removeprefix(PREFIX)} of {type(model).__qualname__} in place, which "
                "is neither a parameter nor a buffer: ranks would each change their own. Expected a forward that "
                "changes buffers alone; make it one with register_buffer()."
            )


def _copy_what_is_written(exported: Exported, facts: dict[str, Fact], model: nn.Module) -> bool:
    """Has a graph change copies of its arguments, not those that it is given, which stages share, and run again with.

    Returns:
        Whether it changes any.
    """
    graph = exported.module.graph
    written = {storage for fact in facts.values() for storage in fact.writes}
    changed = [node for node in graph.find_nodes(op="placeholder") if facts[node.name].makes & written]
    for node in changed:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
    if changed:
        text = (
            f"forward changes its arguments {', '.join(map(str, changed))} in place. What goes through the model is "
            "right, but the caller's tensors stay as they were; return what the script is to see of the change."
        )
        warn_once(logger, model, text)
    return bool(changed)
