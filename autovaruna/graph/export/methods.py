"""Finds out which methods of a model compute from its weights, so that calls of them count like calls of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import FakeTensorMode
from autovaruna.graph.call import UnfamiliarError, outline
from autovaruna.graph.export.errors import quiet_failure
from autovaruna.graph.export.fakes import fake_like, faked
from autovaruna.graph.guards import Guards
from autovaruna.graph.module_state import as_before
from autovaruna.graph.precision import compiling_nothing
from autovaruna.graph.tree import flatten

_MOST_KNOWN = 64


def method_of(model: nn.Module, value: object, name: str) -> bool:
    """Whether an attribute is a method that the model's own class adds to those of every module."""
    is_public = not (name.startswith("_") or hasattr(nn.Module, name))
    return is_public and isinstance(value, MethodType) and value.__self__ is model


class OwnMethods:
    """Tells which calls of a model's methods return what follows from weights; it asks once for calls that are alike.

    Args:
        model: The model.
        guards: What its traces depend on.
    """

    def __init__(self, model: nn.Module, guards: Guards) -> None:
        self._model = model
        self._guards = guards
        self._known: dict[Hashable, bool] = {}
        self._snapshot: Any = None

    def follow_weights(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> bool:
        """Whether a call of a method returns tensors that have a gradient for weights, which compute on `device`."""
        find = partial(follows_weights, self._model, getattr(self._model, name), args, kwargs, device)
        snapshot = self._guards.snapshot()
        if snapshot != self._snapshot or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._snapshot = snapshot
        try:
            kind = name, outline((tuple(args), dict(kwargs)), [])
        except UnfamiliarError:
            return find()
        if kind not in self._known:
            self._known[kind] = find()
        return self._known[kind]


def follows_weights(
    model: nn.Module, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> bool:
    """Whether a method returns tensors that have a gradient for weights; it runs on fake tensors and leaves nothing.

    Args:
        model: The model.
        method: Its method.
        args, kwargs: Arguments of a call.
        device: Where the model computes.
    """
    tensors, tree = flatten((tuple(args), dict(kwargs)))
    if not any(each.dim() for each in tensors):
        return False
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    try:
        with (
            _unchecked_distributions(),
            quiet_failure(),
            as_before(model),
            compiling_nothing(),
            faked(model, mode, device),
            mode,
            torch.enable_grad(),
        ):
            fakes = [fake_like(each.detach(), mode, device) for each in tensors]
            own_args, own_kwargs = tree.unflatten(fakes)
            found, _ = flatten(method(*own_args, **own_kwargs))
            return any(isinstance(each, Tensor) and each.requires_grad for each in found)
    except Exception:  # it asks for numbers: no trace of it is possible
        return False


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Has distributions take their parameters as they are: to check them takes numbers."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
