"""A slice of a whole dimension is no operation, as in PyTorch itself."""

from __future__ import annotations

import torch
from torch import Tensor

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
