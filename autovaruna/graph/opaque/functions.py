"""Keeps autograd functions opaque, whose backward need not be the derivative of their forward; finds their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import Lock, get_ident, local
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from autovaruna._torch import pytree, replaced
from autovaruna.errors import TraceError

Function = type[torch.autograd.Function]
_lock = Lock()
_num_handlers = 0
_replaced: list[tuple[Function, Any]] = []


@dataclass(frozen=True)
class Call:
    """One call of a function's forward; `context` is what torch calls ``ctx``, None if the forward takes none."""

    function: Function
    context: Any
    arguments: tuple[Any, ...]
    run: Callable[[], Any]

    @property
    def wants_gradient(self) -> bool:
        """Whether gradients may be on; torch turns them off for the forward, and tells by what its context has."""
        return self.context is None or bool(self.context.next_functions) or not any(self.context.needs_input_grad)


Handler = Callable[[Call], Any]
"""Returns what the call returns."""


class _HandlerThread(local):
    """What this thread does: its handlers, and the function whose next forward none of them sees."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.plain: Function | None = None


_thread = _HandlerThread()


def plain_apply(function: Function, *args: Any) -> Any:
    """Calls a function as torch does, whatever handlers there are; they see what its forward calls."""
    _thread.plain = function if _num_handlers else None
    try:
        return function.apply(*args)  # type: ignore[no-untyped-call]
    finally:
        _thread.plain = None


@contextmanager
def applied_by(handler: Handler) -> Iterator[None]:
    """Has autograd functions that are called on this thread run by `handler` while the context lasts.

    Those that reach weights which are not among their tensors are refused.
    """
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
    found = [(each, each.forward) for each in functions if not each.__module__.startswith("torch.")]
    for function, known in found:
        _replaced.append((function, vars(function).get("forward")))
        function.forward = staticmethod(_handled(function, getattr(known, "plain", known)))  # type: ignore[method-assign]


def _put_back() -> None:
    while _replaced:
        function, known = _replaced.pop()
        if known is not None:
            function.forward = known  # type: ignore[method-assign]
        else:
            del function.forward


def _handled(function: Function, plain: Callable[..., Any]) -> Callable[..., Any]:
    has_context = function.setup_context is torch.autograd.Function.setup_context

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return plain(*args, **kwargs)

        if _thread.plain is function or not _thread.handlers:
            _thread.plain = None
            return run()
        call = Call(function, args[0] if has_context else None, args[has_context:], run)
        _refuse_weights(call)
        return _thread.handlers[-1](call)

    forward.plain = plain  # type: ignore[attr-defined]
    return forward


def holder_of_weights(given: Any) -> str:
    """Returns what with gradients functions and their arguments hold: a module, a kind of tensor, or nothing."""
    waiting = pytree.tree_leaves(given)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, Tensor):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and any(each.requires_grad for each in value.parameters()):
            return type(value).__qualname__
        for each in _within(value):
            if isinstance(each, Tensor) and each.requires_grad:
                return type(each).__qualname__
            waiting.append(each)
    return ""


def _refuse_weights(call: Call) -> None:
    """Refuses a function that uses the weights of a module, which its backward would find elsewhere."""
    functions = call.function.forward, call.function.backward
    if call.wants_gradient and (holder := holder_of_weights((call.arguments, functions))):
        raise TraceError(
            f"The torch.autograd.Function {call.function.__qualname__} uses the weights of {holder}, which are not "
            "among its tensors, so that their gradients are its own affair. Expected a function of tensors: pass each "
            "weight to apply() and return its gradient; for a function that only saves memory use "
            "torch.utils.checkpoint, or recompute='all'."
        )


def _within(value: Any) -> Iterator[Any]:
    """Yields what a function holds besides its code."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from pytree.tree_leaves((value.func, value.args, value.keywords))
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield from pytree.tree_leaves((cells, value.__defaults__ or (), value.__kwdefaults__ or {}))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@contextmanager
def kept_functions(keep: Callable[[Function, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Has calls of autograd functions on this thread leave nodes, by `keep`, where they have a backward."""
    is_trained = torch.is_grad_enabled()

    def handle(call: Call) -> Any:
        tensors = (each for each in pytree.tree_leaves(call.arguments) if isinstance(each, Tensor))
        if is_trained and call.wants_gradient and any(each.requires_grad for each in tensors):
            return keep(call.function, call.arguments)
        return call.run()

    with plain_checkpoints(), applied_by(handle):
        yield


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Runs what ``torch.utils.checkpoint`` wraps as if it were not wrapped, on this thread, while the context lasts."""
    apply = torch.autograd.Function.__dict__["apply"]
    thread = get_ident()

    def passing(cls: Function, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            return args[0](*args[2:])
        return apply.__get__(None, cls)(*args, **kwargs)

    with replaced(CheckpointFunction, "apply", classmethod(passing)):
        yield
