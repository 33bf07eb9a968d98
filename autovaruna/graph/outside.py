"""Finds what code reads from outside of a model: globals, closures, defaults of arguments, attributes of classes.

The code of the methods that a forward may call, and of the functions that those call, is read for names, and never run.
Of the libraries that models are written with nothing is read.
"""

from __future__ import annotations

import dis
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

_NO_RECORDS = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType, Enum)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "autovaruna", "mpi4py"} - {"__main__", "types", "argparse"}
_NOT_CALLED = frozenset({"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__setstate__", "__reduce__"})
"""Methods that no forward calls, of those that Python calls without a name in the code."""
_NUMBERS = (bool, int, float, str, type(None), Tensor)
_IMMUTABLE_TYPE = 1 << 8
_MOST, _DEPTH = 1000, 3
_MOST_FUNCTIONS = 5000
_LOAD_GLOBAL, _IMPORT, _EXTEND = (dis.opmap[name] for name in ("LOAD_GLOBAL", "IMPORT_NAME", "EXTENDED_ARG"))
_IS_SHIFTED = sys.version_info >= (3, 11)
"""Whether the lowest bit of a global's place among the names of its code says something else."""


class Attributes(MutableMapping[str, Any]):
    """Some attributes of objects, each by a name; of a class, its own ones, without those of its bases."""

    def __init__(self, of: Mapping[str, tuple[Any, str]], kind: type | None = None) -> None:
        self._of = of
        self.kind = kind

    @property
    def own(self) -> Mapping[str, Any]:
        """The same, to be read alone, and fast."""
        return self if self.kind is None else vars(self.kind)

    def __getitem__(self, name: str) -> Any:
        try:
            return vars(self.kind)[name] if self.kind else getattr(*self._of[name])
        except (AttributeError, ValueError):  # a cell may be empty
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(*(self._of.get(name) or (self.kind, name)), value)

    def __delitem__(self, name: str) -> None:
        delattr(*(self._of.get(name) or (self.kind, name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._of if self.kind is None else self.own)

    def __len__(self) -> int:
        return len(self._of if self.kind is None else self.own)


@dataclass
class Place:
    """What holds values, by name: the globals of a module, the attributes of an object, the variables of a closure.

    `path` is what comes before a name, up to a dot or colon; `names` are those that code reads; `is_open` says whether
    it may get others.
    """

    path: str
    held: MutableMapping[str, Any]
    names: set[str] = field(default_factory=set)
    is_open: bool = False

    @property
    def plain(self) -> Mapping[str, Any]:
        """The same, to be read alone, and fast."""
        return self.held.own if isinstance(self.held, Attributes) else self.held


def is_record(value: Any) -> bool:
    """Whether an object has attributes that a script may set."""
    is_of_c = type(value).__flags__ & _IMMUTABLE_TYPE and type(value) is not SimpleNamespace
    return not is_of_c and hasattr(value, "__dict__") and not isinstance(value, _NO_RECORDS)


def _is_of_library(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES


@cache
def _is_installed(module: str) -> bool:
    """Whether a module is of an installed package, of which numbers, texts and tensors alone are followed."""
    return bool({"site-packages", "dist-packages"} & {*Path(getattr(sys.modules.get(module), "__file__", None) or "").parts})


def read_outside(model: nn.Module, owners: Iterable[Any], methods: Iterable[str]) -> list[Place]:
    """Returns what `methods` of a model, whose modules and objects are `owners`, read that none of these holds."""
    walk = _Walk(set(methods))
    for owner in owners:
        walk.value("", type(owner), walk.names)
        for name, value in list(vars(owner).items()):
            if isinstance(value, FunctionType | MethodType | partial):
                walk.value(name, value, walk.names)
    walk.classes_of_model()
    return list(walk.places.values())


class _Walk:
    """One walk; `names` are those in the code so far, of attributes as well: methods of these names may be called."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.places: dict[int, Place] = {}
        self._classes: dict[type, None] = {}
        self._seen: dict[tuple[int, int], Any] = {}
        self._num_of = Counter[str]()
        self.num_functions = 0

    def classes_of_model(self) -> None:
        """Reads the classes that have been met, until no code has a name that is new."""
        known = -1
        while known != len(self.names) + len(self._classes):
            known = len(self.names) + len(self._classes)
            for kind in list(self._classes):
                called = {name for name in vars(kind) if name.startswith("__") and callable(vars(kind)[name])}
                names = (self.names | called - _NOT_CALLED) & vars(kind).keys()
                self._take(f"{kind.__module__}:{kind.__qualname__}.", Attributes({}, kind), names, self.names, id(kind))

    def value(self, path: str, value: Any, names: set[str], depth: int = _DEPTH) -> None:
        """Reads a value that code with some `names` may use."""
        key = id(value), id(names) if isinstance(value, ModuleType) else 0
        if key in self._seen or isinstance(value, Tensor | nn.Module):
            return
        self._seen[key] = value
        if isinstance(value, ModuleType):
            if not _is_of_library(value):
                self._take(f"{value.__name__}:", vars(value), names & vars(value).keys(), names)
            elif value is os and not names.isdisjoint(("environ", "getenv")):
                self._environment(names)
        elif isinstance(value, type):
            self._classes |= dict.fromkeys([each for each in value.__mro__ if not _is_of_library(each)])
        elif value is os.environ or value is os.getenv:
            self._environment(names)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType | staticmethod | classmethod):
            self.value(path, value.__func__, names)
            self.value(path, getattr(value, "__self__", None), names)
        elif isinstance(value, property | cached_property):
            self.value(path, value.fget if isinstance(value, property) else value.func, names)
        elif isinstance(value, partial):
            for each in (value.func, value.args, value.keywords):
                self.value(path, each, names)
            self._take(f"{path}.", value.keywords, {*value.keywords}, names)
        elif isinstance(value, _CONTAINERS) and depth and len(value) <= _MOST:
            for each in list(value.values() if isinstance(value, dict) else value):
                self.value(path, each, names, depth - 1)
        elif hasattr(value, "__wrapped__"):
            self.value(path, value.__wrapped__, names)
        elif depth and not _is_of_library(type(value)):
            self._record(path, value, names, depth)

    def _record(self, path: str, value: Any, names: set[str], depth: int) -> None:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        if is_record(value):
            self._take(f"{path}.", vars(value), {*vars(value)}, names, depth=depth - 1)
        elif slots:
            self._take(f"{path}.", Attributes({each: (value, each) for each in slots}), {*slots}, names)
        self.value(path, type(value), names)

    def _environment(self, names: set[str]) -> None:
        self._take("os.environ:", os.environ, names & os.environ.keys(), names)

    def _function(self, function: FunctionType) -> None:
        if hasattr(function, "__wrapped__"):
            self.value("", function.__wrapped__, self.names)
        if _is_of_library(function) or self.num_functions > _MOST_FUNCTIONS:
            return
        self.num_functions += 1
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = {name: (cell, "cell_contents") for name, cell in cells}
        held |= {name: (function, name) for name in ("__defaults__", "__kwdefaults__") if getattr(function, name)}
        names = self._code(code, function.__globals__)
        path = f"{function.__module__}:{function.__qualname__}."
        self._take(path, Attributes(held), {*held}, names, id(function))

    def _code(self, code: CodeType, held: dict[str, Any]) -> set[str]:
        texts = {each for each in code.co_consts if isinstance(each, str) and len(each) < _MOST}
        names = {*code.co_names, *texts}
        for each in code.co_consts:
            if isinstance(each, CodeType):
                names |= self._code(each, held)
        self.names |= names
        loaded, imported = _globals_in(code)
        loaded |= names if "globals" in loaded else set()
        self._take(f"{held.get('__name__')}:", held, loaded & held.keys(), names)
        for name in sorted(imported & sys.modules.keys()):
            self.value(name, sys.modules[name], names)
        return names

    def _take(
        self,
        path: str,
        held: MutableMapping[str, Any],
        found: set[str],
        names: set[str],
        key: int = 0,
        depth: int = _DEPTH,
    ) -> None:
        """Takes values of a place in, and what they lead to."""
        place = self.places.get(key or id(held))
        if place is None:
            self._num_of[path] += 1
            number = f"#{self._num_of[path]}" if self._num_of[path] > 1 else ""
            place = self.places[key or id(held)] = Place(path[:-1] + number + path[-1], held)
            place.is_open = held is os.environ or (isinstance(held, Attributes) and held.kind is not None)
        is_installed = _is_installed(path.partition(":")[0])
        for name in sorted(found):
            value = held.get(name, self)
            if value is not self:
                if isinstance(value, _NUMBERS) or not (is_installed or isinstance(value, ModuleType)):
                    place.names.add(name)
                self.value(f"{path}{name}", value, names, depth)


def _globals_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Returns the names of the globals that code reads, and of the modules that it imports."""
    loaded, imported, high = set[str](), set[str](), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        place = high << 8 | low
        high = place if operation == _EXTEND else 0
        if operation == _LOAD_GLOBAL:
            loaded.add(code.co_names[place >> _IS_SHIFTED])
        elif operation == _IMPORT:
            imported.add(code.co_names[place])
    return loaded, imported
