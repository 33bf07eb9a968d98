"""Puts a model's tensors back into an exported graph as attributes: inputs are then the caller's alone."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

_OF_THE_MODEL = (InputKind.PARAMETER, InputKind.BUFFER)


def unlift(program: ExportedProgram) -> fx.GraphModule:
    """Returns the graph of a program with parameters, buffers and constants as attributes, by their names in the model.

    Where a program holds anything unusual, ``torch.export`` does the work, in a time that grows with the square of the
    layers.
    """
    signature = program.graph_signature
    kinds = {spec.kind for spec in signature.input_specs}
    is_plain = kinds <= {*_OF_THE_MODEL, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT}
    if not is_plain or any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        module = program.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        return module
    module = fx.GraphModule(
        program.graph_module, copy.deepcopy(program.graph)
    )  # a copy has no names of nodes that left
    held = {**program.state_dict, **program.constants}
    holders: dict[str, nn.Module] = {"": module}
    for node, spec in zip(module.graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            assert spec.target is not None
            _assign(holders, spec.target, held[spec.target], is_buffer=spec.kind is InputKind.BUFFER)
            _replace(module.graph, node, spec.target)
    return module


def _replace(graph: fx.Graph, placeholder: fx.Node, target: str) -> None:
    """Replaces an input by an attribute."""
    with graph.inserting_after(placeholder):
        attribute = graph.create_node("get_attr", target)
    placeholder.replace_all_uses_with(attribute)
    attribute.meta = placeholder.meta
    graph.erase_node(placeholder)


def _assign(holders: dict[str, nn.Module], path: str, value: Any, is_buffer: bool) -> None:
    """Gives a module an attribute; `holders` are the modules that are known by their paths."""
    place, _, name = path.rpartition(".")
    holder = _holder(holders, place)
    if is_buffer:
        holder.register_buffer(name, value)
    else:
        setattr(holder, name, value)


def _holder(holders: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in holders:
        above, _, name = path.rpartition(".")
        parent = _holder(holders, above)
        if not hasattr(parent, name):
            parent.add_module(name, nn.Module())
        holders[path] = getattr(parent, name)
    return holders[path]
