"""Python state that forward changes is refused where calls differ by it, and left alone where they do not."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import TraceError
from tests.graph.models import traced

X = torch.zeros(3, 4)
GLOBAL = {"calls": 0}


class Counter:
    """Counts."""

    calls = 0


class Stateful(nn.Module):
    """Keeps state of a kind, and may multiply by it."""

    of_class: ClassVar[list[int]] = []

    def __init__(self, kind: str, is_used: bool) -> None:
        super().__init__()
        self.layer, self.kind, self.is_used = nn.Linear(4, 4), kind, is_used
        self.seen: list[Any] = []
        self.options = {"scale": 1.0}
        self.counter, self.numbers = Counter(), itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        scale = getattr(self, f"count_{self.kind}")(out)
        return out * scale if self.is_used else out

    def count_list(self, out: Tensor) -> int:
        self.seen.append(1)
        return len(self.seen)

    def count_dict(self, out: Tensor) -> float:
        self.options["scale"] *= 0.5
        return self.options["scale"]

    def count_object(self, out: Tensor) -> int:
        self.counter.calls += 1
        return self.counter.calls

    def count_iterator(self, out: Tensor) -> int:
        return next(self.numbers)

    def count_global(self, out: Tensor) -> int:
        GLOBAL["calls"] += 1
        return GLOBAL["calls"]

    def count_class(self, out: Tensor) -> int:
        self.of_class.append(1)
        return len(self.of_class)


KINDS = ("list", "dict", "object", "iterator", "global", "class")


@pytest.mark.parametrize("kind", KINDS)
def test_what_calls_differ_by_is_refused(kind: str) -> None:
    """Once, each but numbers of modules stayed as it was traced, without a word."""
    with pytest.raises(TraceError, match=r"changes Python state.*register_buffer\(\)"):
        traced(Stateful(kind, is_used=True), X)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_call_reads_is_left_alone(kind: str) -> None:
    assert traced(Stateful(kind, is_used=False), X)
