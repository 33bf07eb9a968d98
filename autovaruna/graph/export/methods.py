"""Finds out which methods of a model compute from its weights, so that calls of them count like calls of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import FakeTensorMode
from autovaruna.graph.export.errors import quiet_failure
from autovaruna.graph.export.fakes import fake_like, faked
from autovaruna.graph.module_state import as_before
from autovaruna.graph.tree import flatten


def method_of(model: nn.Module, value: object, name: str) -> bool:
    """Whether an attribute is a method that the model's own class adds to those of every module."""
    is_public = not (name.startswith("_") or hasattr(nn.Module, name))
    return is_public and isinstance(value, MethodType) and value.__self__ is model


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
            torch.compiler.set_stance("force_eager"),
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
