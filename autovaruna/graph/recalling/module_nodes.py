"""Copies the nodes that the call of a submodule has left in a graph, for a call of another one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autovaruna.graph.arguments import written
from autovaruna.graph.exporting.stack import line_of_forward
from autovaruna.graph.layout import NotPlainError, storage_of
from autovaruna.graph.recalling.copied_facts import Origin, tell_origin
from autovaruna.graph.recalling.module_call import ModuleCall


@dataclass(frozen=True)
class Place:
    """Where a submodule is called: its path in the model, and the line of a forward as nodes know it."""

    path: str
    line: str

    @classmethod
    def of(cls, tracer: Any, call: ModuleCall) -> Place:
        """Returns where a call comes from that is going on."""
        line = "".join(tracer._filter_traceback_frames(line_of_forward()).format()).strip()
        return cls(tracer.path_of_module(call.module), line)

    def rename(self, text: str, other: Place) -> str:
        """Returns the name of a module in this one for the other one; other names stay."""
        length = len(self.path)
        is_inside = text.startswith(self.path) and text[length : length + 1] in ("", ".", "@")
        return other.path + text[length:] if is_inside else text


def last_node(tracer: Any) -> fx.Node:
    """Returns the newest node of a trace."""
    found: fx.Node = tracer.graph._root.prev
    return found


def nodes_since(tracer: Any, last: fx.Node, call: ModuleCall) -> tuple[fx.Node, ...]:
    """Returns the nodes that a call has left after `last`.

    Raises:
        NotPlainError: one does not follow from the call's tensors alone, or changes the arguments.
    """
    found: list[fx.Node] = []
    node = last.next
    while node is not tracer.graph._root:
        found.append(node)
        node = node.next
    known = {*call.nodes, *found}
    given = {storage_of(each) for each in call.call.tensors[: call.num_given]}
    for node in found:
        is_known = is_size(node) or all(each in known or is_size(each) for each in node.all_input_nodes)
        if not is_known or not _is_fit(node, given):
            raise NotPlainError
    for place, node in enumerate(found):
        tell_origin(node, Origin(found[0].name, place, 0))
    return tuple(found)


def _is_fit(node: fx.Node, given: set[int]) -> bool:
    """Whether a node may be copied: an operation that has no name of its own and does not write to some memory."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace != "autovaruna" and given.isdisjoint(
            storage_of(each.meta["val"]) for each in written(node)
        )
    return node.target is operator.getitem or is_size(node)


def is_size(node: fx.Node) -> bool:
    """Whether a node is a size, or compares some, that follows from the batch size: it is the same for all calls."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and value.node.has_hint()


def copy_nodes(
    tracer: Any, nodes: tuple[fx.Node, ...], made: dict[fx.Node, fx.Node], old: Place, new: Place, number: int
) -> None:
    """Leaves nodes once more.

    Args:
        tracer: The trace.
        nodes: The nodes, in order.
        made: What takes the place of other nodes; the copies join it.
        old: Where the nodes come from.
        new: Where the copies come from.
        number: Of the copy.
    """
    for place, node in enumerate(nodes):
        if not is_size(node):
            made[node] = _copy(tracer, node, made)
            tell_origin(made[node], Origin(nodes[0].name, place, number))
            _tell_place(made[node], old, new)


def _copy(tracer: Any, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: made.get(each, each))
    target, name = node.target, None
    if isinstance(target, torch._ops.OpOverload):  # as a trace names it
        name = tracer.graph._target_to_str(target.overloadpacket.__name__)
    copied: fx.Node = tracer.graph.create_node(node.op, target, args, kwargs, name)
    copied.meta.update(node.meta)
    return copied


def _tell_place(node: fx.Node, old: Place, new: Place) -> None:
    stack = node.meta.get("nn_module_stack") or {}
    renamed = {old.rename(key, new): (old.rename(name, new), kind) for key, (name, kind) in stack.items()}
    node.meta["nn_module_stack"] = renamed
    if node.meta.get("stack_trace") == old.line:
        node.meta["stack_trace"] = new.line


def uses_outside(nodes: tuple[fx.Node, ...], ends: set[fx.Node], outputs: set[fx.Node]) -> bool:
    """Whether others use inner nodes of a call, `ends` and sizes aside, or forward returns some as `outputs`."""
    own = set(nodes)
    inner = [each for each in nodes if each not in ends and not is_size(each)]
    return any(each in outputs or not own.issuperset(each.users) for each in inner)
