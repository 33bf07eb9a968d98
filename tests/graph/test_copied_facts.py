"""Holds what is learned of the nodes of recalled submodules without running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph import facts
from tests.graph.models import traced
from tests.graph.test_recall import described, no_modules_recalled
from tests.graph.test_recalled_modules import Layer, Stack, X


def learned_by_running(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> list[str]:
    """Returns the nodes that run while a model is traced, and checks that this tells no more than running all."""
    ran: list[str] = []
    run = facts._Pass._run

    def noting(self: Any, node: Any) -> Any:
        ran.extend([node.name] if node.op == "call_function" else [])
        return run(self, node)

    with monkeypatch.context() as patch:
        patch.setattr(facts._Pass, "_run", noting)
        found = described(traced(model, X))
    with no_modules_recalled():
        assert described(traced(model, X)) == found
    return ran


def test_copies_of_a_layer_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer, whose input needs no gradient, and the second run; what follows from them does not."""
    ran = learned_by_running(monkeypatch, Stack())
    assert sum(name.startswith("layer_norm") for name in ran) == 2


def test_layers_that_change_their_buffers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that outlives a layer is seen by others."""

    def normed(self: Any, x: Tensor) -> Tensor:
        return self.batch(self.inner(x))

    ran = learned_by_running(monkeypatch, Stack(lambda place: Layer(normed, batch=nn.BatchNorm1d(8))))
    assert sum(name.startswith("batch_norm") for name in ran) == 4


def test_what_is_written_into_later_is_known_of_views_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer returns a view of memory without gradient, into which its caller then writes."""

    def rotated(self: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(self.inner(x)).transpose(1, 2)

    def call(self: Any, place: int, layer: nn.Module, x: Tensor) -> Tensor:
        return x.sin() + layer(x).transpose(1, 2).add_(x)

    learned_by_running(monkeypatch, Stack(lambda place: Layer(rotated), call, mix=nn.Linear(12, 12)))


def test_views_of_copies_lie_in_their_memory() -> None:
    """Each layer returns a view of what it has made itself, of no other layer's memory."""

    def viewed(self: Any, x: Tensor) -> Tensor:
        return self.inner(x).relu().view(-1, 96).view(-1, 8, 12)

    model = traced(Stack(lambda place: Layer(viewed)), X)
    made = [model.facts[name].makes for name in model.nodes if name.startswith("relu")]
    views = [model.facts[name].makes for name in model.nodes if name.startswith("view")]
    assert [*map(set, views[::2])] == [*map(set, views[1::2])] == [*map(set, made)]
    assert len({*made}) == 4
