"""Holds that a trace looks no closer at a model than it must."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.opaque import draws
from tests.graph.models import Function, traced

X = torch.zeros(3, 12)


def test_modules_are_not_looked_at_one_by_one_unless_something_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    place = draws._place
    monkeypatch.setattr(draws, "_place", lambda: (looks.append(1), place())[1])
    traced(nn.Sequential(*(nn.Linear(12, 12) for _ in range(9))), X)
    assert len(looks) == 2


def test_a_module_that_draws_is_found_in_the_second_look() -> None:
    def noisy(self: Any, x: Tensor) -> Tensor:
        return x * random.random()

    model = nn.Sequential(nn.Linear(12, 12), Function(noisy), nn.Linear(12, 12))
    assert any(name.startswith("module") for name in traced(model, X).nodes)
