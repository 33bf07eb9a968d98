"""Finds which tensors an operation takes and changes: by its schema, and by counting their versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autovaruna._torch import HigherOrderOperator, OpOverload, pytree

MEAN, SUM = 1, 2
"""The numbers of ``reduction="mean"`` and ``"sum"`` in an operation."""


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operation by name, defaults included; those of other functions have no names."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return {}
    known = target._schema.arguments
    given = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    return given | dict(zip([argument.name for argument in known], node.args, strict=False)) | dict(node.kwargs)


def written(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that an operation changes, of a list each; other functions do not say."""
    return [each for each in changed_by(node.target, node.args, node.kwargs) if isinstance(each, fx.Node)]


def changed_by(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns those arguments of a call, of a list each, that its operation changes as its schema says.

    Normalisation changes its statistics in training alone, and then the schema of most does not say so.
    """
    if not isinstance(operation, OpOverload) or not operation._schema.is_mutable:
        return []
    known = operation._schema.arguments
    given = dict(zip([argument.name for argument in known], args, strict=False)) | dict(kwargs)
    if given.get("training") is False:
        return []
    values = [given.get(each.name) for each in known if each.alias_info is not None and each.alias_info.is_write]
    return pytree.tree_leaves(values)


def give(node: fx.Node, **changed: Any) -> None:
    """Gives other arguments to an operation."""
    target: Any = node.target
    places = [argument.name for argument in target._schema.arguments]
    given = arguments(node) | changed
    by_place = [name for name in places if not target._schema.arguments[places.index(name)].kwarg_only]
    node.args = tuple(given.pop(name) for name in by_place)
    node.kwargs = given


class Counting(TorchFunctionMode):
    """Counts changes by operations that leave it to what runs them: lists of tensors, and operations of libraries.

    A tensor's version rises with each change, but on fake tensors such operations run nothing.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self if isinstance(function, HigherOrderOperator) else nullcontext():  # regions hold others
            result = function(*args, **(kwargs or {}))
        for each in changed_by(function, args, kwargs or {}):
            if isinstance(each, Tensor):
                torch.autograd.graph.increment_version(each)
        return result
