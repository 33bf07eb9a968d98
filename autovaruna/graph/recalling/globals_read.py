"""Notes the globals that functions name while they run, whichever library they are of, and reads them again later."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from re import Pattern
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy
import torch

from autovaruna.graph.watching.held import identities, is_container, is_plain

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
        self._seen: dict[int, CodeType] = {}

    @staticmethod
    def is_possible() -> bool:
        """Whether no debugger watches this thread: it would miss something."""
        return sys.gettrace() is None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes them on this thread while the context lasts."""
        sys.settrace(self._note)
        try:
            yield
        finally:
            sys.settrace(None)

    def now(self) -> dict[tuple[int, str], Any]:
        """Returns what is equal as long as they hold the same."""
        return {place: list(_content(place[1], known.get(place[1]))) for place, known in self._places.items()}

    def are_as_before(self) -> bool:
        """Whether they hold what they held when they were named first."""
        return self.now() == self._first

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or id(frame.f_code) in self._seen:
            return
        self._seen[id(frame.f_code)] = frame.f_code
        known = frame.f_globals
        if str(known.get("__name__")).partition(".")[0] in _NO_MODELS:
            return
        for name in frame.f_code.co_names:
            if name in known and not isinstance(known[name], _FIXED):
                self._places[id(known), name] = known
                self._first.setdefault((id(known), name), list(_content(name, known[name])))


@contextmanager
def unnoted() -> Iterator[None]:
    """Notes nothing on this thread while the context lasts, in which no function of a model's runs."""
    noting = sys.gettrace()
    if not isinstance(getattr(noting, "__self__", None), GlobalsRead):
        yield
        return
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(noting)


def _content(path: str, value: Any) -> Iterator[Any]:
    """Yields numbers, texts, and which objects are there, in containers and attributes too."""
    if isinstance(value, ContextVar):
        value = value.get(None)
    if isinstance(value, set | frozenset | deque):
        value = list(value)
    if is_plain(value) or is_container(value):
        yield type(value)
        yield from identities(path, value, _DEPTH)
    elif isinstance(value, Random):
        yield value.getstate()
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield id(value)
        yield from identities(path, vars(value), _DEPTH)
    elif type(value).__module__ == "itertools":
        yield repr(value)
    else:
        yield id(value) if isinstance(value, _IMMUTABLE) else object()  # what may change is never the same
