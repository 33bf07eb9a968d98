"""Has other code run where autograd functions are called, also by an ``apply`` that was taken out of a class before.

``reverse = Reverse.apply`` is how many programs name such a function. What they hold then is torch's own ``apply``, so
that is given other code, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from types import FunctionType
from typing import Any

import torch

Handler = Callable[..., Any]
"""Takes a function (a class) and its arguments, in place of ``apply``."""

_NAME = "_handled_call"
_torchs: Any = torch.autograd.Function.__dict__["apply"].__func__
_code, _names = _torchs.__code__, _torchs.__globals__
plain_apply: Handler = FunctionType(_code, _names, _code.co_name, _torchs.__defaults__, _torchs.__closure__)
"""Calls a function as torch does, whatever handlers there are."""

_handlers: dict[int, list[Handler]] = {}
_lock = Lock()


@contextmanager
def applied_by(handler: Handler) -> Iterator[None]:
    """Has autograd functions that are called on this thread run by `handler` while the context lasts."""
    thread = get_ident()
    with _lock:
        if not _handlers:
            _names[_NAME], _torchs.__code__ = _dispatch, _other_code(_code.co_freevars)
        _handlers.setdefault(thread, []).append(handler)
    try:
        yield
    finally:
        with _lock:
            _handlers[thread].pop()
            if not _handlers[thread]:
                del _handlers[thread]
            if not _handlers:
                _torchs.__code__ = _code
                del _names[_NAME]


def _dispatch(function: Any, *args: Any, **kwargs: Any) -> Any:
    handlers = _handlers.get(get_ident())
    return (handlers[-1] if handlers else plain_apply)(function, *args, **kwargs)


def _other_code(free: tuple[str, ...]) -> Any:
    """Returns code that calls the dispatcher; it has the free variables of torch's, as functions demand."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _handled_call(cls, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 - a name in torch's module

    return apply.__code__.replace(co_freevars=free)
