"""Lets a model make integers of sizes: ``int(x.shape[0])`` is ``x.shape[0]``, and ``int(lengths.max())`` an item.

Python's own ``int`` asks for a number, which a trace does not have. So the modules of Python in whose code that has
stopped a trace get an ``int`` of their own in the next one, which leaves sizes as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autovaruna.graph.origin import is_users


class IntegerOfSizeError(Exception):
    """Stops a trace where an integer is made of a size that has no fixed number."""


@contextmanager
def integers_of_sizes(names: Collection[str]) -> Iterator[set[str]]:
    """Gives modules of Python (`names`) an ``int`` that leaves sizes as they are, on this thread.

    Yields:
        The names of other modules in which that has been missing, while the context lasts.
    """
    tracing, missing = get_ident(), set[str]()
    kinds: tuple[type, ...] = (torch.SymInt, torch.SymFloat, Tensor)
    before = [kind.__dict__.get("__int__") for kind in kinds]
    shadow = _shadow_of_int(tracing)
    given = [place for place in map(_globals_of, names) if "int" not in place]
    for kind in kinds:
        setattr(kind, "__int__", _noting(getattr(kind, "__int__"), tracing, missing))  # noqa: B009, B010
    for place in given:
        place["int"] = shadow
    try:
        yield missing
    finally:
        for place in given:
            del place["int"]
        for kind, own in zip(kinds, before, strict=True):
            if own is None:
                delattr(kind, "__int__")
            else:
                setattr(kind, "__int__", own)  # noqa: B010


def _noting(known: Callable[[Any], int], tracing: int, missing: set[str]) -> Callable[[Any], int]:
    """Returns ``__int__`` of a size or a tensor; where a user's module calls it for lack of a number, that is noted."""

    def __int__(self: Any) -> int:  # noqa: N807
        name = _caller(sys._getframe(1)) if get_ident() == tracing else ""
        if name and not isinstance(self, Tensor) and self.node.maybe_as_int() is None:
            missing.add(name)
            raise IntegerOfSizeError("int() asks for the number of a size, which has none in a trace")
        try:
            return known(self)
        except Exception:
            missing.update([name] if name else [])
            raise

    return __int__


def _caller(frame: FrameType) -> str:
    """Returns the name of the user's module whose code runs in a frame; empty: there is none that can be found again.

    A module with an ``int`` of its own knows what it wants with it.
    """
    name = str(frame.f_globals.get("__name__", ""))
    is_known = _globals_of(name) is frame.f_globals and "int" not in frame.f_globals
    return name if is_known and is_users(frame.f_code.co_filename) else ""


def _globals_of(name: str) -> dict[str, Any]:
    module = sys.modules.get(name)
    return {} if module is None else vars(module)


def _shadow_of_int(tracing: int) -> type:
    """Returns what stands for ``int`` in a user's module."""

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == tracing and len(args) == 1 and not kwargs:
                value = args[0].item() if isinstance(args[0], Tensor) and args[0].numel() == 1 else args[0]
                if isinstance(value, torch.SymInt | torch.SymFloat):
                    return torch.sym_int(value)  # type: ignore[no-untyped-call]
                return int(value)
            return int(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, int)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, int)

        def __eq__(cls, other: Any) -> bool:
            return other is cls or other is int

        def __hash__(cls) -> int:
            return hash(int)

    return Kind("int", (int,), {})
