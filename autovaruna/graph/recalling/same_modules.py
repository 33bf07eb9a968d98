"""Says whether a module computes what another one does but for the numbers in its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from autovaruna.graph.watching.attribute_reads import Tables
from autovaruna.graph.watching.attributes import HOOKS
from autovaruna.graph.watching.held import is_plain

OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself keeps in every module."""
Pair = tuple[nn.Module, nn.Module]
_DEPTH = 3
_FEWEST = 3
"""Modules in one that is worth comparing, itself included."""


def repeated_modules(model: nn.Module) -> set[int]:
    """Returns the identities of the modules, made of several, that look like another one of the model."""
    looks: dict[Any, int] = {}
    of_module: dict[int, tuple[int, int]] = {}
    for module in reversed(list(model.modules())):
        inner = [of_module.get(id(each), (-1, 1)) for each in module.children()]
        look = type(module), _tensors_of(module), tuple(module._modules), tuple(number for number, _ in inner)
        of_module[id(module)] = looks.setdefault(look, len(looks)), 1 + sum(size for _, size in inner)
    counts = Counter(number for number, _ in of_module.values())
    return {place for place, (number, size) in of_module.items() if size >= _FEWEST and counts[number] > 1}


def _tensors_of(module: nn.Module) -> tuple[Any, ...]:
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return tuple((name, each is not None and (each.shape, each.dtype, each.requires_grad)) for name, each in tensors)


def pairs(first: nn.Module, other: nn.Module) -> list[Pair] | None:
    """Returns the modules of two that are built alike and have no hooks, side by side; None: they are not."""
    if type(first) is not type(other) or not _are_built_alike(vars(first), vars(other)):
        return None
    found = [(first, other)]
    for name, inner in first._modules.items():
        twin = other._modules[name]
        if inner is None or twin is None:
            if inner is not twin:
                return None
            continue
        below = pairs(inner, twin)
        if below is None:
            return None
        found += below
    return found


def _are_built_alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if list(first) != list(other) or any(own.get(hook) for own in (first, other) for hook in HOOKS):
        return False
    return all(list(first[kind]) == list(other[kind]) for kind in ("_parameters", "_buffers", "_modules"))


def have_same_attributes(found: list[Pair], read: Tables) -> bool:
    """Whether modules, from `pairs`, hold the same in all attributes that the first ones have read."""
    twins = {id(first): other for first, other in found}
    for first, other in found:
        own, its = vars(first), vars(other)
        names = [name for name in read.get(id(own), ()) if name in own and name not in OF_MODULES]
        if not all(_is_same(own[name], its[name], twins, _DEPTH) for name in names):
            return False
    return True


def _is_same(first: Any, other: Any, twins: Mapping[int, nn.Module], depth: int) -> bool:
    """Whether two objects mean the same to modules of which one takes the other's place."""
    if isinstance(first, nn.Module):
        return twins.get(id(first), first) is other
    if first is other:
        return True
    if type(first) is not type(other) or not depth:
        return False
    if is_plain(first):
        return bool(first == other)
    parts, its = _parts(first), _parts(other)
    if not parts or len(parts) != len(its):
        return False
    return all(_is_same(each, twin, twins, depth - 1) for each, twin in zip(parts, its, strict=True))


def _parts(value: Any) -> list[Any]:
    """Returns what an object is made of, its kind first; empty: that is not known."""
    match value:
        case MethodType():
            return [value.__func__, value.__self__]
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return [value.__code__, *cells, value.__defaults__, value.__kwdefaults__, id(value.__globals__)]
        case partial():
            return [value.func, value.args, value.keywords]
        case list() | tuple():
            return [type(value), *value]
        case dict():
            return [type(value), *value, *value.values()]
        case _:
            return []
