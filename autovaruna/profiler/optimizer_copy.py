"""Copies an optimizer, with all that it holds, for other parameters than its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class CannotCopyError(Exception):
    """The optimizer holds what its step would change, or take numbers from, whatever parameters it is given."""


def copy_for(optimizer: Optimizer, exchanged: Mapping[int, nn.Parameter]) -> list[Optimizer]:
    """Returns a copy of an optimizer, and of those that it steps with; hooks are left out.

    Args:
        optimizer: The optimizer.
        exchanged: What stands for a parameter in the copy, by identity; the others have no elements in it.

    Raises:
        CannotCopyError: it holds a module, or a function with variables of its own.
    """
    originals = list(nested(optimizer))
    memo: dict[int, Any] = {id(each): type(each).__new__(type(each)) for each in originals}
    for each in originals:
        for parameter in _parameters(each):
            memo[id(parameter)] = exchanged.get(id(parameter), nn.Parameter(torch.empty(0)))
    for each in originals:
        for value in vars(each).values():
            if isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
                memo[id(value)] = _cut_table(value, exchanged, memo)
    for each in originals:
        vars(memo[id(each)]).update({name: copy.deepcopy(value, memo) for name, value in _contents(each)})
    return [memo[id(each)] for each in originals]


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields an optimizer and those that it holds."""
    known: dict[int, Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        each = waiting.pop(0)
        if id(each) in known:
            continue
        known[id(each)] = each
        yield each
        for value in vars(each).values():
            waiting += [held for held in _flat(value) if isinstance(held, Optimizer)]


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _contents(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that a copy needs: not methods that have been replaced, and no hooks.

    Raises:
        CannotCopyError: see `copy_for`.
    """
    for name, value in vars(optimizer).items():
        if callable(value) and hasattr(type(optimizer), name):
            continue
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            yield name, OrderedDict()
            continue
        _check(name, value)
        yield name, value


def _check(name: str, value: Any) -> None:
    for each in _flat(value):
        if isinstance(each, nn.Module) or (isinstance(each, FunctionType) and each.__closure__):
            raise CannotCopyError(f"its attribute {name} holds a {type(each).__name__}")


def _cut_table(table: dict[Any, Any], exchanged: Mapping[int, nn.Parameter], memo: dict[int, Any]) -> dict[Any, Any]:
    """Returns a state, or tensors, by parameter, of those that are exchanged, for what stands for them."""
    found = copy.copy(table)
    found.clear()
    for key, value in table.items():
        if not isinstance(key, Tensor):
            found[key] = copy.deepcopy(value, memo)
        elif id(key) in exchanged:
            new = exchanged[id(key)]
            cut = _cut(value if isinstance(value, dict) else {"": value}, key, new)
            if cut is not None:
                found[new] = cut if isinstance(value, dict) else cut[""]
    return found


def _cut(state: Mapping[Any, Any], old: Tensor, new: Tensor) -> dict[Any, Any] | None:
    """Returns the state of one parameter for a smaller one; None if that cannot be: then it starts anew."""
    found: dict[Any, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            sizes = zip(value.shape, old.shape, strict=False)
            if value.dim() != old.dim() or any(size not in (1, whole) for size, whole in sizes):
                return None
            value = value[tuple(slice(size) for size in new.shape)]
        found[name] = copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)
    return found
