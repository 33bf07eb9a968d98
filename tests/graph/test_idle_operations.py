"""An operation that returns its argument is no operation, as in PyTorch itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autovaruna.errors import TraceError
from tests.graph.models import traced_function

X = torch.randn(6, 8)


def slices(function: object) -> list[tuple[object, ...]]:
    """Returns what follows the tensor in each slice of the trace."""
    nodes = traced_function(function, X).nodes.values()  # type: ignore[arg-type]
    return [node.args[1:] for node in nodes if node.target is torch.ops.aten.slice.Tensor]


def test_whole_dimensions_are_not_sliced() -> None:
    """Neither the ``:`` before another slice, nor bounds that leave nothing out; a step or a bound stays."""
    assert slices(lambda self, x: x[:, 2:5] * 2) == [(1, 2, 5)]
    assert slices(lambda self, x: x[:, :8] * 2 + x[:, 0:8:1]) == []
    assert len(slices(lambda self, x: x[:, ::2] * 2)) == 1
    assert len(slices(lambda self, x: x[:, :7] * 2)) == 1


def test_regions_are_tidied_too() -> None:
    """What runs under ``no_grad`` is a graph in the graph."""

    def detached(self: object, x: Tensor) -> Tensor:
        with torch.no_grad():
            part = x[:, :]
        return x * part

    graphs = traced_function(detached, X).nodes.values()
    assert not any(node.target is torch.ops.aten.slice.Tensor for node in graphs)


def test_what_is_written_to_a_whole_slice_is_written() -> None:
    """The slice shares its memory with the tensor."""

    def shifted(self: object, x: Tensor) -> Tensor:
        y = x * 2
        y[:, :].add_(1)
        return y

    assert slices(shifted) == []


@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.dropout2d, F.feature_alpha_dropout])
def test_dropout_that_drops_nothing_is_none(drop: object) -> None:
    def dropping(self: object, x: Tensor) -> Tensor:
        x = drop(drop(x * 2, 0.0, True), 0.5, False)  # type: ignore[operator]
        return drop(x, 0.5, True)  # type: ignore[operator,no-any-return]

    nodes = traced_function(dropping, torch.randn(6, 8, 2, 2)).nodes.values()
    assert sum("dropout" in str(node.target) for node in nodes) == 1


def test_casts_to_the_dtype_that_is_there_are_none() -> None:
    def casting(self: object, x: Tensor) -> Tensor:
        return (x * 2).float().to(torch.float64).to(torch.float64, copy=True)

    nodes = traced_function(casting, X).nodes.values()
    assert [node.args[1] for node in nodes if node.target is torch.ops.aten.to.dtype] == [torch.float64] * 2


def test_a_model_of_nothing_else_computes_nothing() -> None:
    with pytest.raises(TraceError, match="computes nothing"):
        traced_function(lambda self, x: F.dropout(x.float(), 0.0), X)
