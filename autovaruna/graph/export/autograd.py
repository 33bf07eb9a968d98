"""Finds what torch.export would drop without a word: own backwards, hooks, and Python state that forward changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from autovaruna._torch import pytree
from autovaruna.errors import TraceError
from autovaruna.graph.opaque.functions import Call, Function, applied_by, holder_of_weights, keep, weights_error


@dataclass(frozen=True)
class TensorKind:
    """Stands for a tensor argument of a recorded call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def draw(self, generator: torch.Generator) -> Tensor:
        """Returns random numbers of this kind."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(self.shape, dtype=self.dtype, generator=generator).requires_grad_(self.needs_gradient)
        return torch.zeros(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class FunctionCall:
    """One call of a ``torch.autograd.Function`` during a trace."""

    function: Function
    arguments: tuple[Any, ...]


@contextmanager
def watched(kept: Collection[Function]) -> Iterator[list[FunctionCall]]:
    """Notes calls of autograd functions on this thread while the context lasts.

    Args:
        kept: The functions that are kept whole where gradients are wanted.

    Yields:
        The other calls, to be given to `with_own_backward` after the trace.

    Raises:
        TraceError: forward calls a function with weights of its own.
    """
    calls: list[FunctionCall] = []

    def noting(call: Call) -> Any:
        function, args = call.function, call.arguments
        if call.wants_gradient and (holder := holder_of_weights(function, args)):
            raise weights_error(function, holder)
        if call.wants_gradient and function in kept:
            return keep(function, args)
        calls.append(FunctionCall(function, pytree.tree_map_only(Tensor, _kind, args)))
        return call.run()

    with plain_checkpoints(), applied_by(noting):
        yield calls


def with_own_backward(calls: list[FunctionCall]) -> set[Function]:
    """Returns the functions whose backward is not the derivative of their forward, or cannot be compared with it.

    A trace has the operations of a function's forward and lets autograd derive them. Both ways are compared on random
    numbers of the shapes of the call.
    """
    found: set[Function] = set()
    for call in {(call.function, str(call.arguments)): call for call in calls}.values():
        try:
            is_derivative = _same_gradients(call)
        except Exception:
            is_derivative = False
        found |= set() if is_derivative else {call.function}
    return found


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Runs what ``torch.utils.checkpoint`` wraps as if it were not wrapped, on this thread, while the context lasts."""
    apply = torch.autograd.Function.__dict__["apply"]
    thread = get_ident()

    def passing(cls: Function, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            return args[0](*args[2:])
        return apply.__get__(None, cls)(*args, **kwargs)

    CheckpointFunction.apply = classmethod(passing)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del CheckpointFunction.apply


def hooked(model: nn.Module) -> frozenset[str]:
    """Returns the paths of the modules with backward hooks, which a trace would drop.

    Raises:
        TraceError: the model itself has one, or holds a TorchScript module.
    """
    for path, each in model.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise TraceError(
                f"{path or 'The model'} is a TorchScript module: got {type(each).__qualname__}, which cannot be split. "
                "Expected a torch.nn.Module; take the one that it was made of."
            )
    paths = {path for path, each in model.named_modules() if each._backward_hooks or each._backward_pre_hooks}
    if "" in paths:
        raise TraceError(
            f"The model {type(model).__qualname__} itself has a backward hook, which a trace cannot keep. Expected "
            "none; register it on a submodule, which is then kept whole, or on parameters."
        )
    return frozenset(paths)


def plain_state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the numbers that are attributes of the model's modules, by module path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float) and name != "training"
    }


def check_state(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> None:
    """Refuses a forward that changes numbers which are attributes of modules: a trace would fix them.

    Raises:
        TraceError: one changed.
    """
    for (path, name), value in after.items():
        old = before.get((path, name))
        if old is not None and old != value:
            where = f"{path}.{name}" if path else name
            raise TraceError(
                f"forward changes the Python number {where} ({old} -> {value}), which a trace would fix for good. "
                "Expected a forward that changes buffers alone; make it a tensor with register_buffer(). If only the "
                "first call changes it, run one batch through the model before it is wrapped."
            )


def _kind(tensor: Tensor) -> TensorKind:
    shape = tuple(int(length.node.hint) if isinstance(length, torch.SymInt) else length for length in tensor.shape)
    return TensorKind(shape, tensor.dtype, tensor.requires_grad)


def _same_gradients(call: FunctionCall) -> bool:
    own = _gradients(call, lambda args: call.function.apply(*args))  # type: ignore[no-untyped-call]
    derived = _gradients(call, lambda args: _plain_forward(call.function, args))
    return len(own) == len(derived) and all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(own, derived, strict=True)
    )


def _gradients(call: FunctionCall, run: Callable[[tuple[Any, ...]], Any]) -> list[Tensor]:
    """Returns the gradients of a call's arguments, zeros where there are none."""
    generator = torch.Generator().manual_seed(0)
    args = pytree.tree_map_only(TensorKind, lambda kind: kind.draw(generator), call.arguments)
    leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor) and leaf.requires_grad]
    with torch.enable_grad():
        outputs = [leaf for leaf in pytree.tree_leaves(run(args)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves or not outputs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    starts = [torch.randn(output.shape, dtype=output.dtype, generator=generator) for output in outputs]
    found = torch.autograd.grad(outputs, leaves, starts, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)
    ]


class _Context:
    """Takes what a forward wants to keep for its backward, and forgets it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _plain_forward(function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """Runs a function's forward as ordinary operations."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*args)
    return function.forward(_Context(), *args)
