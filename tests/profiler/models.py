"""Builds and traces small models for the tests of the profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autovaruna.graph.call import describe
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.measure import Key, PartCost, measure, merge, to_profile
from autovaruna.profiler.records import Profile
from tests.catalogue import CASES, Batch, Case

CPU = torch.device("cpu")
WIDTH = 16


class Mlp(nn.Module):
    """Runs equal layers of linear and relu, and returns the mean square."""

    def __init__(self, num_layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def traced(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> TracedModel:
    return trace(model, describe(model, args, kwargs)[1], CPU)


def on_cpu(case: Case, batch_size: int) -> tuple[nn.Module, Batch]:
    """Returns a model of the catalogue, and a batch for it, wherever the others are."""
    batch: Batch = pytree.tree_map_only(Tensor, Tensor.cpu, case.batch(batch_size, 0))
    return case.model().cpu(), batch


def traced_case(name: str, batch_size: int) -> tuple[nn.Module, TracedModel, list[Tensor]]:
    """Returns a model of the catalogue, its trace, and the tensors of the call."""
    model, (args, kwargs) = on_cpu(CASES[name], batch_size)
    tensors, call = describe(model, args, kwargs)
    return model, trace(model, call, CPU), tensors


def profile(
    traced: TracedModel, model: nn.Module, sizes: list[int], known: Mapping[Key, PartCost] | None = None, **options: Any
) -> Profile:
    """Measures all of a model but what is known; the options are those of `measure`."""
    costs = measure(traced, model, sizes, CPU, known=known or {}, **options)
    return to_profile(traced, merge([known or {}, costs]), CPU)
