"""Holds what torch.export made of a call, and makes it plain: the model's own names, no idle nodes, all in one mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autovaruna._torch import OpOverload, schema_of
from autovaruna.graph.cuts import Marker, is_mark
from autovaruna.graph.export.watchers import WatchedCall
from autovaruna.graph.lengths import Lengths
from autovaruna.graph.operators import aliases_of
from autovaruna.graph.side_effects import NumberChange
from autovaruna.graph.tree import Tree

_ALLOWS_CUDNN = ("cudnn_enabled", "cudnn_enable")
"""How operations call the argument."""
aten = torch.ops.aten
_NO_END = 2**63 - 1
_DROPOUTS = (aten.dropout, aten.alpha_dropout, aten.feature_dropout, aten.feature_alpha_dropout)
PREFIX = "model."
"""What the names of the model's tensors start with in a graph of torch.export."""
_CHECKS = {aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_scalar.default}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What torch.export made of a call.

    Attributes:
        module: flat graph; placeholders are the input tensors, attributes have the model's own names.
        output_tree: structure of what the model returns; its tensors are the graph's outputs.
        constants: tensors that are neither parameters nor buffers, by attribute name.
        is_dynamic: whether the batch size is a symbol in the graph.
        left: where forward leaves tensors beside what it returns.
        changes: what it does to numbers of modules, none of which it reads.
        sets: constants that it sets as attributes of modules, none of which any method of the model reads.
        greatest: the batch size up to which the graph holds; None: it holds for all.
        asks_for_one: where the model does something else for a batch of one sample; empty: nowhere.
        asks_for_layout: where the script asks how a tensor lies in memory; empty: nowhere.
        watched: the calls of modules with hooks that only watch.
        lengths: those that vary; None: the graph holds for one shape of each sample.
        fixes_lengths: where the model fixes a size; empty: not known.
    """

    module: fx.GraphModule
    output_tree: Tree
    constants: dict[str, Tensor]
    is_dynamic: bool
    markers: tuple[Marker, ...] = ()
    left: tuple[str, ...] = ()
    changes: tuple[NumberChange, ...] = ()
    sets: tuple[NumberChange, ...] = ()
    greatest: int | None = None
    asks_for_one: str = ""
    asks_for_layout: str = ""
    watched: tuple[WatchedCall, ...] = ()
    lengths: Lengths | None = None
    fixes_lengths: str = ""


def unlift(program: ExportedProgram) -> fx.GraphModule:
    """Returns the graph of a program with attributes, by their names in the model, in place of inputs that are state.

    ``program.module()`` would compile code with these names, which fails at words of Python.
    """
    module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph))  # a copy lacks names of nodes that left
    for node, spec in zip(module.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            assert spec.target is not None
            with module.graph.inserting_after(node):
                attribute = module.graph.create_node("get_attr", spec.target)
            node.replace_all_uses_with(attribute)
            attribute.meta = node.meta
            module.graph.erase_node(node)
    return module


def drop_idle(module: fx.GraphModule) -> None:
    """Replaces each operation that returns its argument by that; a cast to another one's dtype needs no other one."""
    for node in module.graph.find_nodes(op="call_function", target=aten.type_as.default):
        source, result = node.args[0].meta["val"], node.meta["val"]
        if source.device == result.device:
            node.target, node.args = aten.to.dtype, (node.args[0], result.dtype)
    for operation, is_idle in _IDLE.items():
        for node in module.graph.find_nodes(op="call_function", target=operation):
            if is_idle(*node.args, **node.kwargs):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)


def _is_whole(source: fx.Node, dim: int = 0, start: object = None, end: object = None, step: object = 1) -> bool:
    if start not in (None, 0) or step != 1:
        return False
    if end is None or end == _NO_END:
        return True
    value = source.meta.get("val")
    size = value.shape[dim] if isinstance(value, Tensor) else None
    return isinstance(size, int) and size == end  # of a size that varies with the batch, nothing is asked


def _is_there(
    source: fx.Node, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False, memory_format: object = None
) -> bool:
    """Whether a cast without more wishes is to the dtype that a tensor has."""
    value = source.meta.get("val")
    return not copy and memory_format is None and isinstance(value, Tensor) and value.dtype == dtype


_IDLE: dict[OpOverload, Callable[..., bool]] = {
    aten.slice.Tensor: _is_whole,
    **{dropout.default: lambda source, p, train: p == 0 or not train for dropout in _DROPOUTS},
    aten.to.dtype: _is_there,
}


def detach_without_gradients(
    module: fx.GraphModule, parameters: Collection[str], have_gradients: Sequence[bool]
) -> None:
    """Detaches what operations under ``torch.no_grad()`` take, where that may have a gradient: all run in one mode.

    A tensor that such an operation returns as it is, or written into, keeps its gradient.
    """
    inputs = zip(module.graph.find_nodes(op="placeholder"), have_gradients, strict=True)
    graded = {node for node, has_gradient in inputs if has_gradient}
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and str(node.target) in parameters:
            graded.add(node)
        if node.op != "call_function" or graded.isdisjoint(node.all_input_nodes):
            continue
        if is_mark(node) or not node.meta.get("no_grad"):  # marks will be gone
            graded.add(node)
            continue
        if _returns_itself(node):
            node.replace_all_uses_with(node.args[0])
        for source in filter(graded.__contains__, node.all_input_nodes):
            with module.graph.inserting_before(node):
                detached = module.graph.call_function(aten.detach.default, (source,))
            detached.meta = {**node.meta, "val": source.meta["val"]}
            node.replace_input_with(source, detached)


def _returns_itself(node: fx.Node) -> bool:
    """Whether an operation returns its first argument: it writes into that, or has nothing to do, as ``to`` may."""
    aliases, target = aliases_of(node), node.target
    if not aliases or not isinstance(node.args[0], fx.Node) or not isinstance(target, OpOverload):
        return False
    if aliases[0].is_write:
        written = schema_of(target).arguments[0].alias_info
        return written is not None and bool(written.is_write)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return target(*args, **kwargs) is args[0]


def tidy(
    module: fx.GraphModule, input_names: list[str], state: Collection[str], held: Mapping[str, object]
) -> dict[str, Tensor]:
    """Renames placeholders and attributes, drops checks, and returns the constant tensors, of those `held`, by name."""
    for node in list(module.graph.nodes):
        if node.target in _CHECKS:
            module.graph.erase_node(node)
    for node in reversed(module.graph.nodes):
        if not node.users and not node.is_impure():
            module.graph.erase_node(node)
    used = {node.name for node in module.graph.nodes if node.op != "placeholder"}
    for node, name in zip(module.graph.find_nodes(op="placeholder"), input_names, strict=True):
        node.name = node.target = name if name not in used else f"input_{name}"
    constants: dict[str, Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        if target in state:
            node.target = target.removeprefix(PREFIX)
        elif isinstance(value := held.get(target), Tensor):
            constants[target] = value.detach()
    return constants


def allow_cudnn(module: fx.GraphModule, is_enabled: bool) -> None:
    """Says in every operation of a graph that takes it as an argument whether cuDNN may be used."""
    for node in module.graph.nodes:
        known = schema_of(node.target).arguments if isinstance(node.target, OpOverload) else ()
        for place, name in ((place, each.name) for place, each in enumerate(known) if each.name in _ALLOWS_CUDNN):
            node.update_arg(place, is_enabled) if place < len(node.args) else node.update_kwarg(name, is_enabled)
