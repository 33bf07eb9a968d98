"""Notes the globals that functions name while they run, whichever library they are of, and reads them again later."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from re import Pattern
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from autovaruna.graph.held import entries, is_container, is_plain

_OWN = __name__.partition(".")[0]
_NO_MODELS = {_OWN, "torch", "numpy", "sympy", "mpmath", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose globals no forward goes by: torch and what it calls while it traces."""
_IMMUTABLE = (
    Pattern,
    TypeVar,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    numpy.ufunc,
    numpy.generic,
)
_FIXED = type | FunctionType | BuiltinFunctionType | ModuleType
_DEPTH = 2


class GlobalsRead:
    """The globals that functions name, those of torch and Python aside."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], dict[str, Any]] = {}
        self._first: dict[tuple[int, str], Any] = {}

    @staticmethod
    def is_possible() -> bool:
        """Whether no profiler watches this thread: some could not be put back."""
        return sys.getprofile() in (None, _note)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes them on this thread while the context lasts."""
        _noting.append(self)
        sys.setprofile(_note)
        try:
            yield
        finally:
            _noting.pop()
            sys.setprofile(_note if _noting else None)

    def now(self) -> dict[tuple[int, str], Any]:
        """Returns what is equal as long as they hold the same."""
        return {place: list(_content(place[1], known.get(place[1]))) for place, known in self._places.items()}

    def are_as_before(self) -> bool:
        """Whether they hold what they held when they were named first."""
        return self.now() == self._first

    def add(self, known: dict[str, Any], names: Iterable[str]) -> None:
        """Takes names that a function has; `known` are its globals."""
        for name in names:
            place = id(known), name
            if name in known and place not in self._places and not isinstance(known[name], _FIXED):
                self._places[place] = known
                self._first[place] = list(_content(name, known[name]))


_noting: list[GlobalsRead] = []
"""Those whose contexts last, the innermost last; one thread of a process at a time traces."""


def _note(frame: FrameType, event: str, argument: Any) -> None:
    known = frame.f_globals
    if event == "call" and str(known.get("__name__")).partition(".")[0] not in _NO_MODELS:
        for each in _noting:
            each.add(known, frame.f_code.co_names)


def _content(path: str, value: Any) -> Iterator[Any]:
    """Yields numbers, texts, and which objects are there, in containers and attributes too."""
    if isinstance(value, ContextVar):
        value = value.get(None)
    if isinstance(value, set | frozenset | deque):
        value = list(value)
    if is_plain(value) or is_container(value):
        yield type(value)
        yield from _entries(path, value)
    elif isinstance(value, Random):
        yield value.getstate()
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield id(value)
        yield from _entries(path, vars(value))
    elif type(value).__module__ == "itertools":
        yield repr(value)
    else:
        yield id(value) if isinstance(value, _IMMUTABLE) else object()  # what may change is never the same


def _entries(path: str, value: Any) -> Iterator[Any]:
    return ((name, id(each) if isinstance(each, Tensor) else each) for name, each in entries(path, value, _DEPTH))
