"""Calls of one model that differ in nothing but numbers are described once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.call import CallReader, describe
from autovaruna.graph.guards import mode_of


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass
class Pair:
    first: Tensor
    second: Tensor


MODEL = Anything()
X, Y = torch.randn(4, 3), torch.randn(4)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X, Y), {}),
    ((Y, X), {}),
    ((X,), {"y": Y}),
    ((X,), {"z": Y}),
    (([X, Y],), {}),
    (((X, Y),), {}),
    (({"a": X, "b": Y},), {}),
    (({"b": X, "a": Y},), {}),
    ((X, 1), {}),
    ((X, True), {}),
    ((X, 0.0), {}),
    ((X, -0.0), {}),
    ((X, None, "a"), {}),
    ((X[:2], Y[:2]), {}),
    ((X.double(), Y), {}),
    ((X.clone().requires_grad_(), Y), {}),
    ((nn.Parameter(X),), {}),
    ((Pair(X, Y),), {}),
    ((X, {1: Y}), {}),
]


def read(reader: CallReader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return reader.read(args, kwargs, mode_of(MODEL))


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_known_is_what_a_description_says(grad: bool) -> None:
    reader = CallReader(MODEL)
    with torch.set_grad_enabled(grad):
        for args, kwargs in CALLS * 3:
            tensors, call = read(reader, args, kwargs)
            expected, described = describe(MODEL, args, kwargs)
            assert call == described and call.key() == described.key()
            assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in expected]


def test_other_numbers_give_the_same_description() -> None:
    reader = CallReader(MODEL)
    first = read(reader, (X,), {"y": [Y, 2]})[1]
    assert read(reader, (X + 1,), {"y": [Y + 1, 2]})[1] is first
    assert read(reader, (X,), {"y": [Y, 3]})[1] is not first


def test_sizes_without_end_keep_no_memory() -> None:
    reader = CallReader(MODEL)
    for size in range(1, 600):
        assert read(reader, (torch.empty(size),), {})[1].batch_size == size
    assert len(reader._known) < 300


def test_a_forward_that_is_a_function_is_read_anew() -> None:
    model = Anything()
    reader = CallReader(model)
    assert [spec.name for spec in reader.read((X,), {}, "")[1].inputs] == ["args_0"]
    model.forward = lambda images: None  # type: ignore[method-assign]
    assert [spec.name for spec in reader.read((X,), {}, "")[1].inputs] == ["images"]
