"""Copies the hooks of backward of a module that is tried out, so that what they keep stays the script's own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_KINDS = ("_backward_hooks", "_backward_pre_hooks")
Hooks = Sequence[tuple[dict[Any, Any], ...]]
"""The hooks of each module in a tree, in the order of `modules()`: those of both kinds."""


def copied_hooks(module: nn.Module) -> Hooks:
    """Returns copies of the hooks of backward in a module; empty: there are none."""
    own = [tuple(getattr(each, kind) for kind in _KINDS) for each in module.modules()]
    if not any(map(any, own)):
        return ()
    known: dict[int, Any] = {}
    return [
        tuple(OrderedDict((key, _copied(hook, known)) for key, hook in kind.items()) for kind in each) for each in own
    ]


@contextmanager
def hooked(module: nn.Module, hooks: Hooks) -> Iterator[None]:
    """Has a copy of a module go backward through hooks, and evaluate, so that nothing else in it joins samples."""
    modules = list(module.modules())
    modes = [each.training for each in modules]
    module.eval()
    _set(modules, hooks)
    try:
        yield
    finally:
        _set(modules, [tuple(OrderedDict[Any, Any]() for _ in _KINDS)] * len(modules))
        for each, mode in zip(modules, modes, strict=True):
            each.training = mode


def _set(modules: Sequence[nn.Module], hooks: Hooks) -> None:
    for module, both in zip(modules, hooks, strict=True):
        for kind, each in zip(_KINDS, both, strict=True):
            setattr(module, kind, each)


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Returns a copy of what a hook is, or reaches: its functions, their variables, and the objects that hold them."""
    if id(value) not in known:
        known[id(value)] = value  # while it is copied, and if it cannot be
        known[id(value)] = _made(value, known)
    return known[id(value)]


def _made(value: Any, known: dict[int, Any]) -> Any:
    copied: Callable[[Any], Any] = lambda each: _copied(each, known)  # noqa: E731
    if isinstance(value, FunctionType):
        return _function(value, copied)
    if isinstance(value, MethodType):
        return MethodType(copied(value.__func__), copied(value.__self__))
    if isinstance(value, partial):
        given = {name: copied(each) for name, each in value.keywords.items()}
        return partial(copied(value.func), *map(copied, value.args), **given)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple, set, dict):
        return copy.copy(value)
    if isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return value
    return _object(value)


def _function(function: FunctionType, copied: Callable[[Any], Any]) -> FunctionType:
    """Returns a function with variables of its own, in closures and globals."""
    names = set(_names(function.__code__)) & function.__globals__.keys()
    own = {**function.__globals__, **{name: copied(function.__globals__[name]) for name in names}}
    cells = tuple(_cell(cell, copied) for cell in function.__closure__ or ())
    defaults = None if function.__defaults__ is None else tuple(map(copied, function.__defaults__))
    made = FunctionType(function.__code__, own, function.__name__, defaults, cells or None)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _cell(cell: CellType, copied: Callable[[Any], Any]) -> CellType:
    try:
        return CellType(copied(cell.cell_contents))
    except ValueError:  # not assigned yet
        return CellType()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _object(value: Any) -> Any:
    """Returns an object with the same attributes, of which containers are its own."""
    try:
        made = copy.copy(value)
        vars(made).update(
            {name: copy.copy(each) for name, each in vars(value).items() if type(each) in (list, dict, set)}
        )
    except Exception:  # it cannot be copied
        return value
    return made
