"""Keeps autograd functions opaque, whose backward need not be the derivative of their forward; finds their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from autovaruna._torch import pytree, replaced, replaced_here
from autovaruna.errors import TraceError

Function = type[torch.autograd.Function]
Handler = Callable[[Function, tuple[Any, ...], bool, Callable[[], Any]], Any]
"""Takes a function, its arguments, whether gradients may be on, and what runs its forward; returns what it returns."""


@contextmanager
def applied_by(handler: Handler) -> Iterator[None]:
    """Has the script's autograd functions that are called on this thread run by `handler` while the context lasts.

    Those that reach weights which are not among their tensors are refused.
    """

    def find(plain: Callable[[Function, str], Any], function: Function, name: str) -> Any:
        found = plain(function, name)
        is_seen = name == "forward" and not function.__module__.startswith("torch.")
        return _handled(function, found, handler) if is_seen else found

    kind = type(torch.autograd.Function)
    with replaced_here(kind, "__getattribute__", find):  # by which torch finds the forward of what it applies
        yield


def _handled(function: Function, plain: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    has_context = function.setup_context is torch.autograd.Function.setup_context

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        context, given = args[0] if has_context else None, args[has_context:]
        # torch turns gradients off for a forward, and tells by what its context has whether they were on
        may_train = context is None or bool(context.next_functions) or not any(context.needs_input_grad)
        if may_train and (holder := holder_of_weights((given, plain, function.backward))):
            raise TraceError(  # its backward would find them elsewhere
                f"The torch.autograd.Function {function.__qualname__} uses the weights of {holder}, which are not "
                "among its tensors, so that their gradients are its own affair. Expected a function of tensors: pass "
                "each weight to apply() and return its gradient; for a function that only saves memory use "
                "torch.utils.checkpoint, or recompute='all'."
            )
        return handler(function, given, may_train, partial(plain, *args, **kwargs))

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
def opaque_functions(keep: Callable[..., Any]) -> Iterator[None]:
    """Has calls of autograd functions on this thread leave nodes, by `keep`, where they have a backward."""
    is_trained = torch.is_grad_enabled()

    def handle(function: Function, args: tuple[Any, ...], may_train: bool, run: Callable[[], Any]) -> Any:
        tensors = (each for each in pytree.tree_leaves(args) if isinstance(each, Tensor))
        is_kept = is_trained and may_train and any(each.requires_grad for each in tensors)
        return keep(function.__qualname__, function.apply, *args) if is_kept else run()

    with plain_checkpoints(), applied_by(handle):
        yield


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Runs what ``torch.utils.checkpoint`` wraps as if it were not wrapped, on this thread, while the context lasts."""
    apply = torch.autograd.Function.__dict__["apply"]
    thread = get_ident()

    def passing(cls: Function, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            is_trained = any(isinstance(each, Tensor) and each.requires_grad for each in args)  # as in plain PyTorch
            with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
                return args[0](*args[2:])
        return apply.__get__(None, cls)(*args, **kwargs)

    with replaced(CheckpointFunction, "apply", classmethod(passing)):
        yield
