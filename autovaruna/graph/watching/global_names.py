"""Finds the globals, attributes of classes and variables of closures that a model's forward may read, by its code.

What forward calls by name is looked into, too, but no library: scripts do not set the globals of one.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from autovaruna.graph.origin import is_users
from autovaruna.graph.watching.held import is_container, is_plain

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
Places = dict[str, Callable[[], Any]]
"""What gives the value now, by name; raises KeyError or ValueError if there is none."""


def shared_places(model: nn.Module) -> Places:
    """Returns the numbers, containers and tensors outside of a model that its forward names."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    search = _Search({kind for kind in kinds if _is_own(kind)})
    for module in model.modules():
        search.add(module.forward)
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            search.add(hook)
    return search.run()


class _Search:
    """Follows functions by the names in their code.

    Args:
        kinds: Classes of modules, whose methods and attributes a name may be.
    """

    def __init__(self, kinds: set[type]) -> None:
        self._kinds = sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
        self._waiting: list[FunctionType] = []
        self._seen: set[CodeType] = set()
        self._found: Places = {}

    def add(self, value: Any) -> None:
        """Adds a function that may run."""
        value = value.__func__ if isinstance(value, MethodType | staticmethod | classmethod) else value
        value = value.fget if isinstance(value, property) else value
        if isinstance(value, FunctionType) and value.__code__ not in self._seen and _is_own(value):
            self._seen.add(value.__code__)
            self._waiting.append(value)

    def run(self) -> Places:
        """Returns what all of them name."""
        while self._waiting:
            function = self._waiting.pop()
            names = set(_names(function.__code__))
            for name in names & function.__globals__.keys():
                self._take(f"{function.__module__}.{name}", function.__globals__, name, names)
            for kind in self._kinds:
                for name in names & vars(kind).keys():
                    self._take(f"{kind.__qualname__}.{name}", vars(kind), name, set())
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._take_cell(f"{function.__qualname__}.{name}", cell)
        return self._found

    def _take(self, path: str, owner: Any, name: str, names: set[str]) -> None:
        """Takes a value, and of an object those of its attributes that are among the names."""
        value = owner[name]
        if is_plain(value) or is_container(value):
            self._found[path] = lambda: owner[name]
        else:
            inner = _attributes(value)
            for each in names & inner.keys():
                self._take(f"{path}.{each}", inner, each, set())
        self.add(value)

    def _take_cell(self, path: str, cell: Any) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        if is_plain(value) or is_container(value):
            self._found[path] = lambda: cell.cell_contents
        self.add(value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _attributes(value: Any) -> Mapping[str, Any]:
    """Returns the attributes of a class or module of the user's program, or of an object."""
    if isinstance(value, type | ModuleType):
        return vars(value) if _is_own(value) else {}
    return getattr(value, "__dict__", {}) if not isinstance(value, nn.Module | FunctionType | MethodType) else {}


def _is_own(value: Any) -> bool:
    """Whether a function, class or module is of the user's program."""
    if isinstance(value, FunctionType):
        name: Any = value.__code__.co_filename
    else:
        name = getattr(value if isinstance(value, ModuleType) else sys.modules.get(value.__module__), "__file__", "")
    return is_users(name or "") and not str(name or "").startswith(_LIBRARIES)
