"""Holds that parameters, buffers and constants are attributes of a graph as torch.export's own way has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autovaruna.graph.exporting.deferred import compile_regions, deferred_compilation
from autovaruna.graph.exporting.unlift import unlift

X = torch.zeros(3, 4)


class Holding(nn.Module):
    """Holds a tied parameter, buffers of both kinds, one of which it changes, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.offset = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        with torch.no_grad():
            fixed = self.second(x).exp()
        return self.first(x) * self.scale + self.offset + torch.tensor([1.0, 2.0, 3.0, 4.0]) + fixed


def rows(module: fx.GraphModule) -> list[Any]:
    nodes = [node for node in module.graph.nodes if node.target != "_guards_fn"]
    return [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in nodes]


def test_it_is_the_graph_that_torch_makes() -> None:
    model = Holding()
    program = torch.export.export(model, (X,))
    expected = program.module(check_guards=False)
    with deferred_compilation():
        module = unlift(program)
    assert rows(module) == rows(expected)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owner, _, attribute = name.rpartition(".")
        assert getattr(module.get_submodule(owner), attribute) is tensor
    module.recompile()
    assert torch.equal(module(X)[0], expected(X))


def test_graphs_are_compiled_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[fx.GraphModule] = []
    compile_now = fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: (compiled.append(self), compile_now(self))[1])
    with deferred_compilation():
        module = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
        for _ in range(3):
            module.recompile()
        assert not compiled
        assert torch.equal(module(X), X)
    assert len(compiled) == 1
    module.recompile()
    assert len(compiled) == 2


def test_regions_are_compiled() -> None:
    with deferred_compilation():
        inner = fx.symbolic_trace(nn.Tanh())
        graph = fx.Graph()
        graph.output(graph.get_attr("inner"))
        outer = fx.GraphModule({"inner": inner}, graph)
    compile_regions(outer)
    assert "tanh" in inner.code
