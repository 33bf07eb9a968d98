"""Finds what modules hold besides tensors and modules: objects such as a configuration, and containers of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from autovaruna.graph.words import is_array, words

_PLAIN = (bool, int, float, str, type(None))
_NO_RECORDS = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType, Enum)
_IMMUTABLE_TYPE = 1 << 8
_DEPTH = 3
_MOST = 1000
"""Entries of a container that is looked into, and objects of a model."""


def records(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the objects with attributes of their own that modules hold, each once, with their path."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        for name, value in _open(module):
            _collect(f"{path}.{name}".removeprefix("."), value, _DEPTH, found)
    return list(found.values())


def _collect(path: str, value: Any, depth: int, found: dict[int, tuple[str, Any]]) -> None:
    if depth and len(found) < _MOST and id(value) not in found and _is_record(value):
        found[id(value)] = path, value
        for name, inner in _open(value):
            _collect(f"{path}.{name}", inner, depth - 1, found)


def _open(owner: object) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object that are of classes written in Python."""
    for name, value in list(vars(owner).items()):
        if not type(value).__flags__ & _IMMUTABLE_TYPE:
            yield name, value


def _is_record(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _NO_RECORDS)


def is_plain(value: object) -> bool:
    """Says whether an object is a number or a text, or a tuple of such: nothing in it can change."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(each, _PLAIN) for each in value))


def is_container(value: object) -> bool:
    """Says whether `entries` looks into an object."""
    return isinstance(value, Tensor | list | tuple | dict) or is_array(type(value))


def entries(path: str, value: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yields the plain values and tensors in a container with their paths, and arrays in words."""
    if is_plain(value) or isinstance(value, Tensor):
        yield path, value
    elif is_array(type(value)):
        yield path, words(value)
    elif depth and isinstance(value, list | tuple | dict) and len(value) <= _MOST:
        yield path, len(value)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in list(items):
            yield from entries(f"{path}.{name}", inner, depth - 1)


def identities(path: str, value: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yields what `entries` does, and of tensors which object is there."""
    for name, each in entries(path, value, depth):
        yield name, id(each) if isinstance(each, Tensor) else each
