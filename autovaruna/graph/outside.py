"""Finds what code reads from outside of a model: globals, closures, defaults of arguments, attributes of classes.

The code of the methods that a forward may call, and of the functions that those call, is read for names, and never run.
Of the libraries that models are written with nothing is read.
"""

from __future__ import annotations

import dis
import os
import sys
from collections import ChainMap, Counter, UserDict, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property, lru_cache, partial, partialmethod
from itertools import islice
from pathlib import Path
from threading import local
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

_NO_RECORDS = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType, Enum)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NUMBERS = (bool, int, float, str, type(None), Tensor)
_LEADS: dict[type, tuple[str, ...]] = {
    **{MethodType: ("__func__", "__self__"), staticmethod: ("__func__",), classmethod: ("__func__",)},
    **{property: ("fget",), cached_property: ("func",), type(cache(len)): ("__wrapped__",)},
    **{partial: ("func", "args"), partialmethod: ("func", "args")},
}
"""What leads from an object on to code, and to what this is given."""
_HOLDERS = (local, ChainMap, UserDict)  # classes of Python's own whose objects hold what a script has set
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "autovaruna", "mpi4py"} - {"__main__", "types", "argparse"}
_LIBRARIES |= {"pytest", "_pytest"}  # an `assert` of a test leads to all of it
_NOT_CALLED = frozenset({"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__setstate__", "__reduce__"})
"""Methods that no forward calls, of those that Python calls without a name in the code."""
_WORDS_OF_CLASSES = frozenset({"__doc__", "__module__", "__qualname__", "__annotations__", "__dict__", "__slots__"})
_OF_LAUNCHERS = frozenset(f"{of}RANK" for of in ("", "LOCAL_", "GROUP_", "NODE_")) | frozenset(
    {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
"""Variables of the environment that each rank has to itself, and that libraries set late."""
_IMMUTABLE_TYPE = 1 << 8
MOST_ENTRIES, MOST_DEPTH = 1000, 6
"""Entries of a container that is looked into, or objects of a model, and how deep containers are followed."""
_MOST_FUNCTIONS = 5000


def _value_of(variable: ContextVar[Any], _: str) -> Any:
    return variable.get()


class _Attributes(MutableMapping[str, Any]):
    """Attributes of objects that have no dict of them, each by a name and with what returns it."""

    def __init__(self, of: Mapping[str, partial[Any]]) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        try:
            return self._of[name]()
        except (AttributeError, ValueError, LookupError):  # a variable of a closure may have no value
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        owner, attribute = self._of[name].args
        owner.set(value) if isinstance(owner, ContextVar) else setattr(owner, attribute, value)

    def __delitem__(self, name: str) -> None:
        delattr(*self._of[name].args)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


@dataclass
class OutsidePlace:
    """What holds values, by name: the globals of a module, the attributes of an object, the variables of a closure.

    `path` is what comes before a name, with a dot or colon; `names` are those that code reads. An `owner`, as a class,
    may get others.
    """

    path: str
    held: Mapping[str, Any]
    names: set[str] = field(default_factory=set)
    owner: Any = None

    @property
    def is_open(self) -> bool:
        """Whether there may come other names."""
        return self.owner is not None and not isinstance(self.held, _Attributes)

    def values(self) -> dict[str, Any]:
        """Returns what its names have, and whatever an owner has."""
        names = [*self.held] if self.is_open and self.held is not os.environ else self.names & self.held.keys()
        return {name: self.held[name] for name in names if name in self.held}

    def put_back(self, before: Mapping[str, Any]) -> None:
        """Gives back `values` of before; names that are new, but not Python's own, go."""
        now = self.values()
        for name in now.keys() | before.keys():
            if name not in before and not name.startswith("__"):
                self._put(name)
            elif name in before and now.get(name, before) is not before[name]:
                self._put(name, before[name])

    def _put(self, name: str, *value: Any) -> None:
        if isinstance(self.owner, type):
            (setattr if value else delattr)(self.owner, name, *value)
        elif isinstance(self.held, MutableMapping):
            (self.held.__setitem__ if value else self.held.__delitem__)(name, *value)


def is_record(value: Any) -> bool:
    """Whether an object has attributes that a script may set."""
    is_of_c = type(value).__flags__ & _IMMUTABLE_TYPE and type(value) is not SimpleNamespace
    return not is_of_c and hasattr(value, "__dict__") and not isinstance(value, _NO_RECORDS)


def _has_slots(value: Any) -> bool:
    return not is_record(value) and any("__slots__" in vars(kind) for kind in type(value).__mro__)


def read_outside(owners: Iterable[Any], methods: Iterable[str]) -> list[OutsidePlace]:
    """Returns what `methods` of a model, whose modules and objects are `owners`, read that none of these holds."""
    walk = _Walk(set(methods))
    for owner in owners:
        walk.follow("", type(owner), walk.names)
        for name, value in list(vars(owner).items()):
            is_led_to = isinstance(owner, nn.Module) and (isinstance(value, CONTAINERS) or _has_slots(value))
            if is_led_to or isinstance(value, FunctionType | MethodType | partial):
                walk.follow(name, value, walk.names)
    walk.follow_classes()
    return list(walk.places.values())


@cache
def is_installed(module: str) -> bool:
    """Whether a module is of an installed package: of what it holds, numbers, texts and tensors alone count."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_of_library(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES


def items_of(container: Any, most: int = sys.maxsize - 1) -> list[tuple[Any, Any]]:
    """Returns what a container holds, each with its key or place; empty if that is more than `most`.

    No method of a class of its own is called: it might load what a library has, or raise.
    """
    if isinstance(container, dict):
        held: Iterable[tuple[Any, Any]] = dict.items(container)
    else:
        kind: Any = next(each for each in CONTAINERS if isinstance(container, each))
        held = enumerate(kind.__iter__(container))
    found = list(islice(held, most + 1))
    return found if len(found) <= most else []


class _Walk:
    """One walk; `names` are those in the code so far, of attributes as well: methods of these names may be called."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.places: dict[int, OutsidePlace] = {}
        self._classes: dict[type, None] = {}
        self._seen: dict[tuple[int, int], Any] = {}
        self._num_of = Counter[str]()
        self._num_functions = 0

    def follow_classes(self) -> None:
        """Reads the classes that have been met, until no code has a name that is new."""
        known = -1
        while known != len(self.names) + len(self._classes):
            known = len(self.names) + len(self._classes)
            for kind in list(self._classes):
                called = {name for name, value in vars(kind).items() if name.startswith("__") and callable(value)}
                names = ((self.names | called - _NOT_CALLED) & vars(kind).keys()) - _WORDS_OF_CLASSES
                self._take(f"{kind.__module__}:{kind.__qualname__}.", vars(kind), names, self.names, kind)

    def follow(self, path: str, value: Any, names: set[str], depth: int = MOST_DEPTH) -> None:
        """Reads a value that code with some `names` may use."""
        key = id(value), id(names) if isinstance(value, ModuleType) else 0
        if key in self._seen or isinstance(value, Tensor | nn.Module):
            return
        self._seen[key] = value
        is_os = value is os and not names.isdisjoint(("environ", "getenv"))
        if is_os or value is os.environ or value is os.getenv:
            self._take("os.environ:", os.environ, (names & os.environ.keys()) - _OF_LAUNCHERS, names, os.environ)
        elif isinstance(value, ModuleType):
            if not _is_of_library(value):
                self._take(f"{value.__name__}:", vars(value), names & vars(value).keys(), names)
        elif isinstance(value, type):
            kinds = [*type.mro(value), *type.mro(type(value))]
            self._classes |= dict.fromkeys([each for each in kinds if not _is_of_library(each)])
        elif isinstance(value, FunctionType):
            self._read_function(value)
        elif isinstance(value, CONTAINERS) and depth:
            for _, each in items_of(value, MOST_ENTRIES):
                self.follow(path, each, names, depth - 1)
        elif type(value) in _LEADS:
            for name in _LEADS[type(value)]:
                self.follow(path, getattr(value, name), names)
            if isinstance(value, partial):
                self._take(f"{path}.", value.keywords, {*value.keywords}, names)
        elif isinstance(value, ContextVar):
            self._take(f"{path}.", _Attributes({"value": partial(_value_of, value, "value")}), {"value"}, names, value)
        elif depth and (isinstance(value, _HOLDERS) or not _is_of_library(type(value))):
            self._read_record(path, value, names, depth)

    def _read_record(self, path: str, value: Any, names: set[str], depth: int) -> None:
        slots = {
            name: partial(getattr, value, name)
            for kind in type(value).__mro__
            for name in getattr(kind, "__slots__", ())
        }
        held = vars(value) if is_record(value) or isinstance(value, local) else _Attributes(slots)
        self._take(f"{path}.", held, {*held}, names, value, depth=depth - 1)
        self.follow(path, type(value), names)

    def _read_function(self, function: FunctionType) -> None:
        self.follow("", vars(function).get("__wrapped__"), self.names)
        if _is_of_library(function) or self._num_functions > _MOST_FUNCTIONS:
            return
        self._num_functions += 1
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = {name: partial(getattr, cell, "cell_contents") for name, cell in cells}
        own = [name for name in ("__defaults__", "__kwdefaults__") if getattr(function, name)]
        held |= {name: partial(getattr, function, name) for name in own}
        names = self._read_code(function.__code__, function.__globals__)
        path = f"{function.__module__}:{function.__qualname__}."
        self._take(path, _Attributes(held), {*held}, names, function)
        self._take(f"{path}__dict__.", vars(function), {*vars(function)}, names, vars(function))

    def _read_code(self, code: CodeType, held: dict[str, Any]) -> set[str]:
        names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
        for each in code.co_consts:
            names |= self._read_code(each, held) if isinstance(each, CodeType) else set()
        self.names |= names
        loaded, imported = _globals_in(code)
        read = loaded | names if "globals" in loaded else loaded
        self._take(f"{held.get('__name__')}:", held, {*read} & held.keys(), names)
        for name in sorted(imported & sys.modules.keys()):
            self.follow(name, sys.modules[name], names)
        return names

    def _take(
        self,
        path: str,
        held: Mapping[str, Any],
        found: set[str],
        names: set[str],
        owner: Any = None,
        depth: int = MOST_DEPTH,
    ) -> None:
        """Takes in what an owner, or a dict of its own, holds, and what that leads to."""
        key = id(held if owner is None else owner)
        if key not in self.places:
            self._num_of[path] += 1
            number = f"#{self._num_of[path]}" * (self._num_of[path] > 1)
            self.places[key] = OutsidePlace(path[:-1] + number + path[-1], held, owner=owner)
        of_package = is_installed(path.partition(":")[0])
        for name in sorted(found & held.keys()):
            value = held.get(name)
            if isinstance(value, _NUMBERS) or not (of_package or isinstance(value, ModuleType)):
                self.places[key].names.add(name)
            if isinstance(value, type) and is_installed(value.__module__):
                self._read_numbers(value, names)
            else:
                self.follow(f"{path}{name}", value, names, depth)

    def _read_numbers(self, named: type, names: set[str]) -> None:
        """Reads numbers of a package's class that code only names: of methods, those of the model's objects count."""
        for kind in type.mro(named):
            held = {} if _is_of_library(kind) else vars(kind)
            found = {name for name in (names & held.keys()) - _WORDS_OF_CLASSES if isinstance(held[name], _NUMBERS)}
            if found:
                self._take(f"{kind.__module__}:{kind.__qualname__}.", held, found, names, kind)


@lru_cache(maxsize=_MOST_FUNCTIONS)
def _globals_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of the globals that code reads, and of the modules that it imports."""
    found: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "IMPORT_NAME": set()}
    for each in dis.get_instructions(code):
        if each.opname in found:
            found[each.opname].add(each.argval)
    return frozenset(found["LOAD_GLOBAL"]), frozenset(found["IMPORT_NAME"])
