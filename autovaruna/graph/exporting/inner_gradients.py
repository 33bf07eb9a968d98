"""Traces ``torch.autograd.grad`` in forward: the operations of its backward become operations of the graph.

Autograd saves results of operations, and views, as tensors that a trace has not seen; they are found again by where
they lie in memory. It does not see what composite operations are made of, so these are taken apart as far as forward
goes backward. Forward's own backward runs as in plain PyTorch, and autograd derives it as it derives any operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor

from autovaruna._torch import FakeTensor, has_kernel
from autovaruna.errors import TraceError
from autovaruna.graph.origin import users_line

_COMPOSITE = "CompositeImplicitAutograd"
_SIZES = (torch.ops.aten.size.default, torch.ops.aten.stride.default, torch.ops.aten.storage_offset.default)
_OF_TORCH = ("fetch_object_proxy", "maybe_handle_decomp")


class GoesBackwardError(TraceError):
    """Stops a trace where forward goes backward itself, more often than the trace was made for."""

    def __init__(self, text: str, count: int) -> None:
        super().__init__(text)
        self.count = count


@contextmanager
def inner_gradients(most: int) -> Iterator[None]:
    """Traces the first `most` calls of ``torch.autograd.grad`` on this thread, while the context lasts; refuses others.

    Raises:
        GoesBackwardError: there are more.
        TraceError: forward calls ``backward()``.
    """
    own: Any = torch.autograd
    tracing, run = get_ident(), own._engine_run_backward
    calls = 0

    def running(outputs: Any, starts: Any, keeps: bool, creates: bool, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if get_ident() != tracing:
            return run(outputs, starts, keeps, creates, inputs, *args, **kwargs)
        if kwargs.get("accumulate_grad"):
            raise TraceError(_refusal("backward()"))
        calls += 1
        if calls > most:
            raise GoesBackwardError(_refusal("torch.autograd.grad"), calls)
        with _aliases():
            found = run(outputs, starts, keeps, creates, inputs, *args, **kwargs)
            return found if creates else tuple(each if each is None else each.detach() for each in found)

    own._engine_run_backward = running
    try:
        with _taken_apart(lambda: calls < most):
            yield
    finally:
        own._engine_run_backward = run


def _refusal(name: str) -> str:
    return (
        f"forward goes backward itself ({name}){users_line()}, which a trace cannot keep. Expected a forward that "
        "leaves that to the caller; move what needs gradients into a submodule, which is then kept whole as one "
        "operation, or write the derivative as operations."
    )


@contextmanager
def _taken_apart(goes_on: Callable[[], bool]) -> Iterator[None]:
    """Takes composite operations apart, as autograd does, as long as `goes_on` says so.

    What operations are given stays alive as long: a trace forgets tensors that a model lets go of.
    """
    own: Any = proxy_tensor
    tracing, known = get_ident(), own.maybe_handle_decomp
    alive: list[Any] = []

    def handling(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        is_ours = get_ident() == tracing and goes_on()
        if is_ours:
            alive.append((args, kwargs))
        found = known(mode, func, args, kwargs)
        if found is NotImplemented and is_ours and _is_composite(func):
            with mode:
                return func.decompose(*args, **kwargs)
        return found

    own.maybe_handle_decomp = handling
    try:
        yield
    finally:
        own.maybe_handle_decomp = known


def _is_composite(func: Any) -> bool:
    return func not in _SIZES and has_kernel(func.name(), _COMPOSITE)


@contextmanager
def _aliases() -> Iterator[None]:
    """Takes tensors that autograd has saved for those of the trace that they are."""
    own: Any = proxy_tensor
    known = own.fetch_object_proxy

    def fetching(tracer: Any, tensor: Any) -> Any:
        tracked = tracer.tensor_tracker
        if isinstance(tensor, FakeTensor) and tensor not in tracked:
            place = _place(tensor)
            same = [each for each in list(tracked) if isinstance(each, Tensor) and _place(each) == place]
            if same:
                tracked[tensor] = tracked[same[-1]]
        return known(tracer, tensor)

    own.fetch_object_proxy = fetching
    try:
        yield
    finally:
        own.fetch_object_proxy = known


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common that are the same numbers."""
    lengths = *map(str, tensor.shape), *map(str, tensor.stride()), str(tensor.storage_offset())
    return tensor.untyped_storage()._cdata, tensor.dtype, lengths
