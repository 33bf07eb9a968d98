"""Has other code run where autograd functions are called, also by an ``apply`` that was taken out of a class before.

``reverse = Reverse.apply`` is how many programs name such a function. What they hold then calls ``Reverse.forward``, so
that the forwards of all functions are given other code, in place. Torch's own functions are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import Lock, local
from typing import Any

import torch

Function = type[torch.autograd.Function]

_METHODS = ("forward", "setup_context")


@dataclass(frozen=True)
class Call:
    """One call of a function: of its forward, or of its ``setup_context``, which follows where it has one.

    Attributes:
        function: The function.
        is_forward: Whether its forward is called.
        context: What torch calls ``ctx``; None: a forward that takes none.
        arguments: What the function was called with.
        run: Runs what is called, as torch does; to be called once, if at all.
    """

    function: Function
    is_forward: bool
    context: Any
    arguments: tuple[Any, ...]
    run: Callable[[], Any]

    @property
    def wants_gradient(self) -> bool:
        """Whether gradients may be on; torch turns them off for the forward, and tells by what its context has."""
        return self.context is None or bool(self.context.next_functions) or not any(self.context.needs_input_grad)


Handler = Callable[[Call], Any]
"""Returns what the call returns."""


class _Thread(local):
    """What this thread does: its handlers, and the function whose next forward none of them sees."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.plain: Function | None = None


_thread = _Thread()
_lock = Lock()
_num_handlers = 0
_replaced: list[tuple[Function, str, Any]] = []


def plain_apply(function: Function, *args: Any) -> Any:
    """Calls a function as torch does, whatever handlers there are; they see what its forward calls."""
    _thread.plain = function if _num_handlers else None
    try:
        return function.apply(*args)  # type: ignore[no-untyped-call]
    finally:
        _thread.plain = None


@contextmanager
def applied_by(handler: Handler) -> Iterator[None]:
    """Has autograd functions that are called on this thread run by `handler` while the context lasts."""
    _count(+1)
    _thread.handlers.append(handler)
    try:
        yield
    finally:
        _thread.handlers.pop()
        _count(-1)


def _count(change: int) -> None:
    """Counts the handlers of all threads; functions are changed while there are any."""
    global _num_handlers
    with _lock:
        before, _num_handlers = _num_handlers, _num_handlers + change
        if not before:
            _replace([*_subclasses(torch.autograd.Function)])
            torch.autograd.Function.__init_subclass__ = classmethod(_replace_new)  # type: ignore[assignment]
        if not _num_handlers:
            del torch.autograd.Function.__init_subclass__
            _put_back()


def _subclasses(function: Function) -> Iterator[Function]:
    for each in function.__subclasses__():
        yield each
        yield from _subclasses(each)


def _replace_new(function: Function, /, **options: Any) -> None:
    super(torch.autograd.Function, function).__init_subclass__(**options)
    _replace([function])


def _replace(functions: list[Function]) -> None:
    found = [(each, name, getattr(each, name)) for each in functions if _is_users(each) for name in _METHODS]
    for function, name, known in found:
        if name == "forward" or _has_setup(function):
            _replaced.append((function, name, vars(function).get(name)))
            setattr(function, name, staticmethod(_handled(function, name, getattr(known, "plain", known))))


def _put_back() -> None:
    while _replaced:
        function, name, known = _replaced.pop()
        if known is not None:
            setattr(function, name, known)
        else:
            delattr(function, name)


def _handled(function: Function, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    is_forward = name == "forward"
    has_context = not (is_forward and _has_setup(function))

    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return plain(*args, **kwargs)

        if _thread.plain is function or not _thread.handlers:
            _thread.plain = None
            return run()
        context = args[0] if has_context else None
        given = args[has_context:] if is_forward else args[1]
        return _thread.handlers[-1](Call(function, is_forward, context, given, run))

    method.plain = plain  # type: ignore[attr-defined]
    return method


def _is_users(function: Function) -> bool:
    return not function.__module__.startswith("torch.")


def _has_setup(function: Function) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context
