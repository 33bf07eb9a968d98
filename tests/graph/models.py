"""Traces small models for the tests of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.graph.call import CallSpec, describe
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from tests.catalogue.small import Written

CPU = torch.device("cpu")


def call_of(model: nn.Module, *args: Any, **kwargs: Any) -> CallSpec:
    return describe(model, args, kwargs)[1]


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> TracedModel:
    return trace(model, call_of(model, *args, **kwargs), CPU)


def traced_function(function: Callable[..., Any], *args: Tensor, **parts: nn.Module | Tensor) -> TracedModel:
    """Traces a function of ``(self, *args)``."""
    return traced(Written(function, **parts), *args)


def named(model: TracedModel, start: str) -> str:
    """Returns the only node whose name starts with a text."""
    found = [name for name in model.nodes if name.startswith(start)]
    assert len(found) == 1, (start, list(model.nodes))
    return found[0]
