"""Pieces: their code, and what autocast does in them."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.pieces import ArgumentSource, Piece, direct, extract
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.measure import measure
from tests.catalogue.small import Written
from tests.graph.models import CPU, traced


def whole(model: TracedModel) -> Piece:
    return extract(model, model.block_of, [spec.node for spec in model.outputs])


def arguments(piece: Piece, model: nn.Module, x: Tensor) -> list[Any]:
    """Returns arguments with leaves of their own."""
    return [
        model.get_parameter(each.name).detach().requires_grad_(each.block >= 0)
        if each.source is ArgumentSource.PARAMETER
        else x
        for each in piece.arguments
    ]


def test_what_fails_is_shown_with_the_line_of_its_node() -> None:
    model = Written(lambda self, x, y: torch.tanh(x @ y))
    graph = torch.export.export(model, (torch.randn(3, 4), torch.randn(4, 2))).graph_module
    with pytest.raises(RuntimeError) as caught:
        direct(graph)(torch.randn(3, 4), torch.randn(5, 2))
    frame = traceback.extract_tb(caught.tb)[-1]
    assert frame.filename.startswith("<eval_with_key>") and (frame.line or "").startswith("matmul = ")


def no_gradient_inside(self: nn.Module, x: Tensor) -> Tensor:
    x = self.first(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        weights = x @ self.first.weight.sum(0).unsqueeze(1)
    return self.last(x * weights.float()).mean()


def test_what_is_under_no_grad_keeps_its_precision_and_its_grad_mode() -> None:
    """Story: torch.export loses ``torch.no_grad()`` inside ``torch.autocast`` when it makes regions of them."""
    model = Written(no_gradient_inside, first=nn.Linear(4, 4), last=nn.Linear(4, 1))
    x = torch.randn(6, 4)
    piece = whole(traced(model, x))
    given = arguments(piece, model, x)
    (found,) = piece.module(*given)
    found.backward()
    expected = model(x)
    expected.backward()
    assert torch.equal(found, expected)
    leaves = [(argument.name, leaf.grad) for argument, leaf in zip(piece.arguments, given, strict=True)]
    for name, parameter in model.named_parameters():
        (gradient,) = (each for of, each in leaves if of == name and each is not None)
        assert torch.equal(gradient, parameter.grad)


BFLOAT16 = torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("around", [nullcontext(), BFLOAT16], ids=["float32", "bfloat16"])
def test_weights_that_are_cast_count_once_not_once_a_micro_batch(around: Any) -> None:
    """The copy of the weight is memory of the rank; what a micro-batch keeps does not hold it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1024, bias=False))
    with around:
        graph = traced(model, torch.ones(6, 4))
    copies = sum(block.buffer_bytes for block in graph.graph.blocks)
    assert copies == (2 * (4 * 4 + 4 + 4 * 1024) if around is BFLOAT16 else 0)
    costs = measure(graph, model, [2], CPU, iterations=1)
    assert all(cost.num_bytes.inside < 1024 for cost in costs.values())
