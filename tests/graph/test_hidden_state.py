"""Python state that forward changes is refused where calls differ by it, and left alone where they do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.graph.verify.eager_vs_graph import compare
from tests.graph.models import CPU, traced

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
        self.last: Tensor | None = None
        self.held = {"last": torch.zeros(())}

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

    def count_tensor(self, out: Tensor) -> Any:
        last, self.last = self.last, out.detach().mean()
        return 1.0 if last is None else last

    def count_tensor_in_dict(self, out: Tensor) -> Tensor:
        last, self.held["last"] = self.held["last"], out.detach().mean()
        return last

    def count_class(self, out: Tensor) -> int:
        self.of_class.append(1)
        return len(self.of_class)


def check(model: nn.Module) -> None:
    """Traces a model, and compares the trace with two calls of it."""
    compare(traced(model, X), model, [X], CPU)


KINDS = ("list", "dict", "object", "iterator", "global", "class", "tensor", "tensor_in_dict")


@pytest.mark.parametrize("kind", KINDS)
def test_what_calls_differ_by_is_refused(kind: str) -> None:
    """Once, each but numbers of modules stayed as it was traced, without a word."""
    with pytest.raises(TraceError, match=r"changes Python state.*register_buffer\(\)|computes something else"):
        check(Stateful(kind, is_used=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_call_reads_is_left_alone(kind: str) -> None:
    check(Stateful(kind, is_used=False))


class Carrying(nn.Module):
    """Has a tensor that is no buffer, and does something with it."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act, self.prev = nn.Linear(4, 4), act, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x))


def carry(self: Any, out: Tensor) -> Tensor:
    last, self.prev = self.prev, out.detach().mean()
    return out + last  # type: ignore[no-any-return]


def write(self: Any, out: Tensor) -> Tensor:
    self.prev.mul_(0.5).add_(out.detach().mean())
    return out + self.prev  # type: ignore[no-any-return]


def write_first(self: Any, out: Tensor) -> Tensor:
    self.prev = out.detach()
    return out + self.prev  # type: ignore[no-any-return]


def fill(self: Any, out: Tensor) -> Tensor:
    if not hasattr(self, "places"):
        self.places = torch.arange(4)
    return out + self.places  # type: ignore[no-any-return]


def own(self: Any, out: Tensor) -> Tensor:
    made = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made.add_(1.0)
    return out + made


@pytest.mark.parametrize("act", [carry, write])
def test_a_tensor_that_calls_carry_on_is_refused_by_name(act: Any) -> None:
    """Once, it stayed as it was traced."""
    with pytest.raises(TraceError, match=r"\bprev\b.*register_buffer\(\)"):
        check(Carrying(act))


@pytest.mark.parametrize("act", [write_first, fill, own])
def test_a_tensor_that_is_made_in_each_call_is_left_alone(act: Any) -> None:
    check(Carrying(act))
