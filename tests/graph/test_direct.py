"""The code of a graph whose operations are called directly does what its forward does, and fails where it fails."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.pieces.deferral import direct


class Net(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.tanh(x @ y)
        return z, *torch.split(z, 1, dim=1)[:2], z.sum(0, keepdim=True)


def traced() -> torch.fx.GraphModule:
    return torch.export.export(Net(), (torch.randn(3, 4), torch.randn(4, 2))).graph_module


def test_it_computes_the_same_bits() -> None:
    module, x, y = traced(), torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    for one, other in zip(direct(module)(x, y), module(x, y), strict=True):
        assert torch.equal(one, other) and one.requires_grad and one.stride() == other.stride()


def test_no_operation_goes_through_python(monkeypatch: pytest.MonkeyPatch) -> None:
    run, x, y = direct(traced()), torch.randn(3, 4), torch.randn(4, 2)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("an operation was called through Python")

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", refuse)
    run(x, y)


def test_what_fails_is_shown_with_the_line_of_its_node() -> None:
    with pytest.raises(RuntimeError) as caught:
        direct(traced())(torch.randn(3, 4), torch.randn(5, 2))
    frame = traceback.extract_tb(caught.tb)[-1]
    assert frame.filename.startswith("<eval_with_key>") and (frame.line or "").startswith("matmul = ")
