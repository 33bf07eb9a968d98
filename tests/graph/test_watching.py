"""Holds that a trace looks no closer at a model than it must."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph import random as generators
from tests.graph.models import Function, traced

X = torch.zeros(3, 12)


def test_modules_are_not_looked_at_one_by_one_unless_something_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    place = generators._place
    monkeypatch.setattr(generators, "_place", lambda: (looks.append(1), place())[1])
    traced(nn.Sequential(*(nn.Linear(12, 12) for _ in range(9))), X)
    assert len(looks) == 2


def test_a_module_that_draws_is_found_in_the_second_look() -> None:
    def noisy(self: Any, x: Tensor) -> Tensor:
        return x * random.random()

    model = nn.Sequential(nn.Linear(12, 12), Function(noisy), nn.Linear(12, 12))
    assert any(name.startswith("module") for name in traced(model, X).nodes)


def test_a_trace_under_a_debugger_is_the_same() -> None:
    """Whoever watches each line by sys.settrace, as debuggers and coverage do, finds the same graph."""

    def picked(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.data.mean(1, keepdim=True)
        return torch.where(x > scale, self.layer(x), x.new_zeros(x.shape[0], 12))

    model = nn.Sequential(nn.Linear(12, 12), Function(picked, layer=nn.Linear(12, 12)))
    plain, lines = traced(model, X), list[str]()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        lines.extend([event] * (frame.f_code is picked.__code__))
        return watch if frame.f_code is picked.__code__ else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        watched = traced(model, X)
    finally:
        sys.settrace(before)
    assert "line" in lines
    assert list(watched.nodes) == list(plain.nodes) and watched.graph == plain.graph
