"""Caches arithmetic on symbolic sizes: a deep model asks for the same few sums and products thousands of times.

Making one fake tensor takes some twenty of them, each of which goes through sympy. What comes out depends on the two
expressions alone, as long as torch learns nothing that replaces a symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch._logging import _internal
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_OPERATIONS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min", "sym_and", "sym_or")
_OTHERS = ("maybe_as_int", "wrap_int")
_OF_SYMBOLS = {"_replacements_version_counter", "_translation_validation_enabled"}
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_pre_dispatch_mode: Callable[..., Any] = torch._ops._get_dispatch_mode_pre_dispatch


@contextmanager
def cached_size_arithmetic() -> Iterator[None]:
    """Recalls arithmetic on sizes, on this thread, while the context lasts, if this torch has what that takes."""
    if not _is_supported():
        yield
        return
    arithmetic = _Arithmetic()
    own: Any = SymNode
    before = {name: getattr(own, name) for name in (*_OPERATIONS, *_OTHERS)}
    for name in _OPERATIONS:
        setattr(own, name, arithmetic.operation(name, before[name]))
    own.maybe_as_int, own.wrap_int = arithmetic.as_int(own.maybe_as_int), arithmetic.wrap(own.wrap_int)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(own, name, method)


class _Arithmetic:
    """What was learned of sizes; a later replacement of a symbol makes it forget."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._of: tuple[Any, int] = (None, -1)
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def operation(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what runs an operation on two sizes once, and then makes its result anew."""

        def recall(size: Any, other: Any) -> Any:
            if not self._is_fit(size) or type(other) is not SymNode or _is_recording():
                return run(size, other)
            one, two = size._expr, other._expr
            key = (
                name,
                id(one),
                id(two),
                size._hint,
                other._hint,
                size.pytype,
                other.pytype,
                size._optimized_summation,
                other._optimized_summation,
            )
            known = self._known.get(key)
            if known is None:
                result = run(size, other)
                self._known[key] = one, two, dict(vars(result))
                return result
            return _made(known[2])

        return recall

    def as_int(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what asks once for each expression whether it is a number."""

        def recall(size: Any) -> Any:
            if not self._is_fit(size):
                return run(size)
            key = "maybe_as_int", id(size._expr)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = size._expr, run(size)
            return known[1]

        return recall

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what makes a size of a number."""

        def recall(size: Any, number: int) -> Any:
            if not self._is_fit(size) or type(number) is not int:
                return run(size, number)
            key = "wrap_int", number
            known = self._known.get(key)
            if known is None:
                result = run(size, number)
                self._known[key] = (dict(vars(result)),)
                return result
            return _made(known[0])

        return recall

    def _is_fit(self, size: Any) -> bool:
        """Whether what is known holds for a size; what was known of other symbols is forgotten."""
        if get_ident() != self._thread:
            return False
        symbols = size.shape_env
        if symbols is None or symbols._translation_validation_enabled:
            return False
        now = symbols, symbols._replacements_version_counter
        if now != self._of:
            self._of = now
            self._known.clear()
        return True


def _made(state: dict[str, Any]) -> Any:
    made = SymNode.__new__(SymNode)
    made.__dict__ = state.copy()
    return made


def _is_recording() -> bool:
    """Whether torch writes operations on sizes into a graph."""
    return bool(torch._C._get_dispatch_mode(_PROXY) or _pre_dispatch_mode(_PROXY))


def _is_supported() -> bool:
    """Whether this version of torch has the private parts that recalling takes, and logs no arithmetic."""
    has_methods = all(hasattr(SymNode, name) for name in (*_OPERATIONS, *_OTHERS))
    return has_methods and vars(ShapeEnv()).keys() >= _OF_SYMBOLS and not _internal.GET_DTRACE_STRUCTURED
