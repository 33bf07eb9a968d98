"""Traces small models for the tests of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.graph.call import CallSpec, describe
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel

CPU = torch.device("cpu")


class Function(nn.Module):
    """Wraps a function of tensors as a model; `parts` are modules and parameters that it may use as ``self.name``."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def call_of(model: nn.Module, *args: Any, **kwargs: Any) -> CallSpec:
    """Describes a call."""
    return describe(model, args, kwargs)[1]


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> TracedModel:
    """Traces one call of a model."""
    return trace(model, call_of(model, *args, **kwargs), CPU)


def traced_function(function: Callable[..., Any], *args: Tensor, **parts: nn.Module | Tensor) -> TracedModel:
    """Traces a function of ``(self, *args)``."""
    return traced(Function(function, **parts), *args)


def named(model: TracedModel, start: str) -> str:
    """Returns the only node whose name starts with a text."""
    found = [name for name in model.nodes if name.startswith(start)]
    assert len(found) == 1, (start, list(model.nodes))
    return found[0]
