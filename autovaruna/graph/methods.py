"""Tells which calls of a model's own methods return what follows from weights: they count as calls of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from autovaruna._torch import OWN_CALL, FakeTensorMode
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.call import UnfamiliarError, outline
from autovaruna.graph.export.errors import quiet_failure
from autovaruna.graph.guards import Guards
from autovaruna.graph.module_state import fake_like, unchecked_distributions, with_fake_state
from autovaruna.graph.precision import compiling_nothing
from autovaruna.graph.side_effects import restored_attributes
from autovaruna.graph.tree import flatten

_MOST_KNOWN = 64


def is_own_method(model: nn.Module, value: object, name: str) -> bool:
    """Whether an attribute is a method that the model's own class adds to those of every module."""
    is_own = not (name.startswith("__") or hasattr(nn.Module, name))
    return is_own and isinstance(value, MethodType) and value.__self__ is model


@contextmanager
def own_calls(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Has functions run where methods of a model call it, or modules of it; these may call all of them as before."""
    before = {module: vars(module).get(OWN_CALL) for module in calls}

    def once(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_once(*args: Any, **kwargs: Any) -> Any:
            with _in_place(before):
                return call(*args, **kwargs)

        return call_once

    with _in_place({module: once(call) for module, call in calls.items()}):
        yield


@contextmanager
def _in_place(calls: Mapping[nn.Module, Callable[..., Any] | None]) -> Iterator[None]:
    """Puts into modules what their calls are while the context lasts; None: calls of their class."""
    before = {module: vars(module).get(OWN_CALL) for module in calls}
    try:
        _put(calls)
        yield
    finally:
        _put(before)


def _put(calls: Mapping[nn.Module, Callable[..., Any] | None]) -> None:
    for module, call in calls.items():
        if call is None:
            vars(module).pop(OWN_CALL, None)
        else:
            vars(module)[OWN_CALL] = call


class _Uses(TorchFunctionMode):
    """Records whether an operation has been given a weight."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or any(isinstance(each, nn.Parameter) for each in args)
        return func(*args, **(kwargs or {}))


class OwnMethods:
    """Tells which calls of a model's methods return what follows from weights; it asks once for like calls."""

    def __init__(self, model: nn.Module, guards: Guards) -> None:
        self._model, self._guards = model, guards
        self._known: dict[Hashable, bool] = {}
        self._untraced: set[str] = set()
        self._snapshot: Any = None

    @contextmanager
    def without_trace(self, name: str, error: TraceError) -> Iterator[None]:
        """Has a method that cannot be traced run as it is from now on; raises the `error` if it cannot do that."""
        try:
            yield
        except InputError:
            raise error from None
        self._untraced.add(name)

    def follow_weights(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, is_split: bool = False
    ) -> bool:
        """Whether a call of a method returns tensors that have a gradient for weights, which compute on `device`.

        Of a model that `is_split` it is enough that the method uses weights before it asks for numbers.
        """
        if name in self._untraced:
            return False
        snapshot = self._guards.snapshot()
        if snapshot != self._snapshot or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._snapshot = snapshot
        try:
            kind = name, is_split, outline((tuple(args), dict(kwargs)), [])
        except UnfamiliarError:
            return self._try_out(name, args, kwargs, device, is_split)
        if kind not in self._known:
            self._known[kind] = self._try_out(name, args, kwargs, device, is_split)
        return self._known[kind]

    def _try_out(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, is_split: bool
    ) -> bool:
        tensors, tree = flatten((tuple(args), dict(kwargs)))
        if not any(each.dim() for each in tensors):
            return False
        uses, calls = _Uses(), list[Any]()

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if not torch.is_grad_enabled():  # a loop of calls without gradients, as ``generate``: one by one they count
                raise TraceError(f"{type(self._model).__name__} calls itself without gradients.")
            return self._model(*args, **kwargs)

        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        try:
            with (
                unchecked_distributions(),
                quiet_failure(),
                restored_attributes(self._model),
                compiling_nothing(),
                with_fake_state(self._model, mode, device),
                mode,
                torch.enable_grad(),
                own_calls({self._model: call}),
                uses,
            ):
                fakes = [fake_like(each.detach(), mode, device) for each in tensors]
                own_args, own_kwargs = tree.unflatten(fakes)
                found, _ = flatten(getattr(self._model, name)(*own_args, **own_kwargs))
                return any(isinstance(each, Tensor) and each.requires_grad for each in found)
        except Exception:  # it asks for numbers: a trace of it, which knows those of constants, may still be possible
            return is_split and uses.found and not calls
