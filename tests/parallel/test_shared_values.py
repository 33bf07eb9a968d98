"""What a script sets outside of the model between calls counts if forward reads it, as in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.graph.watching.global_names import shared_places
from autovaruna.graph.watching.shared_values import SharedValues
from tests.parallel.training import QUIET

NUMBER, TENSOR, TABLE, CONFIG, UNREAD = 1.0, torch.ones(()), {"a": [1.0]}, SimpleNamespace(scale=1.0, unread=0), 0
X = torch.linspace(-1, 1, 24).reshape(6, 4)
HERE = sys.modules[__name__]


def held() -> Any:
    """Returns a function with a variable of its own, and what sets that."""
    own = 1.0

    def change() -> None:
        nonlocal own
        own = 2.0

    return (lambda: own), change


VARIABLE, CHANGE_VARIABLE = held()


def factor() -> Any:
    return NUMBER * TENSOR * VARIABLE()


class Net(nn.Module):
    """Reads all of it, but for a part."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale() * CONFIG.scale

    def scale(self) -> Any:
        return factor() * TABLE["a"][0] * self.of_class

    def log(self) -> int:
        return UNREAD


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "number": lambda patch: patch.setattr(HERE, "NUMBER", 2.0),
    "tensor": lambda patch: patch.setattr(HERE, "TENSOR", torch.full((), 2.0)),
    "container": lambda patch: patch.setitem(TABLE, "a", [2.0]),
    "object": lambda patch: patch.setattr(CONFIG, "scale", 2.0),
    "class": lambda patch: patch.setattr(Net, "of_class", 2.0),
    "variable": lambda patch: CHANGE_VARIABLE(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_outside_of_the_model_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, such values stayed as they were traced."""
    model = Net()
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    wrapped(X)
    CHANGES[kind](monkeypatch)
    for _ in range(2):
        assert torch.equal(wrapped(X), model(X))
    monkeypatch.setattr(HERE, "UNREAD", 1)
    monkeypatch.setattr(CONFIG, "unread", 1)
    wrapped(X)
    assert wrapped._session.traces is not None and wrapped._session.traces.num_known == 2


def test_what_a_call_sets_itself_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    values = SharedValues(Net())
    values.watch()
    monkeypatch.setattr(HERE, "NUMBER", 3.0)
    values.settle()
    assert values.words() == ""
    monkeypatch.setattr(HERE, "NUMBER", 4.0)
    assert "NUMBER:4.0" in values.words()


def test_libraries_are_not_looked_into() -> None:
    assert shared_places(nn.TransformerEncoderLayer(4, 2)) == {}
