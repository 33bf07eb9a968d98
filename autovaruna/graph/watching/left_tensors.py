"""Finds tensors that a forward leaves beside what it returns: in attributes, and where hooks of modules put them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autovaruna.graph.exporting.known import is_known
from autovaruna.graph.said import warn_once
from autovaruna.graph.watching.held import entries, records

logger = logging.getLogger(__name__)
_MOST_NAMES = 5
_OF_MODULES = frozenset(vars(nn.Module()))


def left_tensors(model: nn.Module) -> list[str]:
    """Returns where the model's forward, which has just been traced, has left tensors; those of constants apart."""
    found = {name: None for name, value in _places(model) for _, each in entries("", value, 2) if _is_left(each)}
    return list(found)


def say_what_is_left(names: Sequence[str], model: nn.Module) -> None:
    """Warns of tensors that plain PyTorch would have beside what the model returns, and ranks have not."""
    if names:
        text = (
            f"forward leaves tensors in {', '.join(names[:_MOST_NAMES])}{' and more' * (len(names) > _MOST_NAMES)}. "
            "They stay where they are made, on a rank and in a micro-batch: after a call nothing new is there. A loss "
            "must not be made of them outside of the model; return them if the script goes on from them."
        )
        warn_once(logger, model, text)


def _is_left(value: Any) -> bool:
    return isinstance(value, FakeTensor) and not isinstance(value, nn.Parameter) and not is_known(value)


def _places(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what forward and hooks may put tensors into; hooks of torch's own keep weights that they have made."""
    for path, owner in [*model.named_modules(), *records(model)]:
        if type(owner).__module__.startswith("torch."):
            continue
        for name, value in list(vars(owner).items()):
            if not (isinstance(owner, nn.Module) and name in _OF_MODULES):
                yield f"{path}.{name}".removeprefix("."), value
    for module in model.modules():
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
            yield from _of_hook(hook)


def _of_hook(hook: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(hook, MethodType):
        yield from ((f"{type(hook.__self__).__qualname__}.{name}", each) for name, each in _attributes(hook.__self__))
        hook = hook.__func__
    if not isinstance(hook, FunctionType) or hook.__module__.startswith("torch."):
        return
    for name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True):
        value = cell.cell_contents
        yield name, value
        yield from ((f"{name}.{inner}", each) for inner, each in _attributes(value))
    for name in hook.__code__.co_names:
        if name in hook.__globals__:
            yield name, hook.__globals__[name]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    return [] if isinstance(value, nn.Module | type) or not hasattr(value, "__dict__") else list(vars(value).items())
