"""Reads what a submodule of a trace goes by besides its arguments: attributes, globals, attributes of classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.graph.recalling.globals_read import GlobalsRead
from autovaruna.graph.recalling.same_modules import OF_MODULES
from autovaruna.graph.watching.attribute_reads import NOTHING, Reads, Tables
from autovaruna.graph.watching.global_names import Places, shared_places
from autovaruna.graph.watching.held import identities, is_plain
from autovaruna.graph.watching.hidden_state import hidden_state, state_of_classes

_FIXED = (BuiltinFunctionType, MethodType, ModuleType, Enum, type, nn.Module, Tensor, partial)
_FIXED_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEPTH = 3


class _NotFixedError(Exception):
    """Says that an object may change in a way that does not show."""


class Held:
    """What the modules of a model hold, and what else its forward names.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def _places(self) -> Places:
        """What forward names; most models repeat nothing, and are not searched for it."""
        return shared_places(self._model)

    def inside(self, module: nn.Module) -> Any:
        """Returns what is equal as long as nothing that a submodule and its classes hold has changed."""
        owners = [vars(each) for each in module.modules()]
        tables = [*owners, *(own[kind] for own in owners for kind in ("_parameters", "_buffers", "_modules"))]
        return [{name: id(value) for name, value in table.items()} for table in tables], hidden_state(module)

    def by(self, module: nn.Module, read: Tables, reads: Reads, named: GlobalsRead) -> Any:
        """Returns what is equal as long as what a submodule went by has not changed.

        Args:
            module: The submodule, or one that is built alike.
            read: The attributes that were read.
            reads: What is known of their owners.
            named: The globals that were named.

        Returns:
            What they hold now; None: something may change in a way that does not show.
        """
        try:
            attributes = [_content(value, _DEPTH, reads.owners) for value in _attributes(read, reads)]
        except _NotFixedError:
            return None
        return attributes, named.now(), dict(self._named()), state_of_classes(module)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for path, get in self._places.items():
            try:
                found = list(identities(path, get()))
            except (KeyError, ValueError):  # it is gone
                continue
            yield from found


def _attributes(read: Tables, reads: Reads) -> Iterator[Any]:
    """Yields what attributes that were read hold now."""
    for place, names in read.items():
        own = reads.owners[place]
        for name in names:
            if name not in OF_MODULES and not name.startswith("__"):
                yield own.get(name, NOTHING)


def _content(value: Any, depth: int, owners: Mapping[int, Any]) -> Any:
    """Returns what is equal as long as an object means the same; the reads of `owners` are looked at by themselves."""
    if value is NOTHING or isinstance(value, _FIXED + _FIXED_OF_TORCH):
        return id(value)
    if is_plain(value):
        return type(value), value
    if depth and isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return id(value), [_content(each, depth - 1, owners) for each in cells]
    if depth and type(value) in (list, tuple, torch.Size):
        return [_content(each, depth - 1, owners) for each in value]
    if depth and type(value) is dict:
        return {name: _content(each, depth - 1, owners) for name, each in value.items()}
    if id(getattr(value, "__dict__", None)) in owners:
        return id(value)
    raise _NotFixedError
