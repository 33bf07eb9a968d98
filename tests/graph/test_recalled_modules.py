"""Holds that a trace which recalls repeated submodules is the trace that calls each of them."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import CutPoint
from autovaruna.errors import TraceError
from autovaruna.graph.exporting import program
from autovaruna.graph.recalling.recalled_modules import RecalledModules, recalled_modules
from tests.graph.models import traced
from tests.graph.test_recall import described, no_modules_recalled, outcome

X = torch.zeros(3, 8, 12)
NUM_LAYERS = 4
count = 0


class Layer(nn.Module):
    """Has everything that a layer may go by; `how` is what it does besides."""

    def __init__(self, how: Callable[..., Any] | None = None, **parts: Any) -> None:
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(12), nn.Linear(12, 12), nn.Dropout(0.1)
        self.how = how
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any, *args: Any) -> Any:
        if self.how is not None:
            return self.how(self, x, *args)
        return x + self.drop(F.relu_(self.inner(self.norm(x)))) * x.shape[1] / x.shape[0]


class Stack(nn.Module):
    """Calls layers one after another as `call` does, and returns what `end` makes of it."""

    def __init__(
        self,
        make: Callable[[int], nn.Module] = lambda place: Layer(),
        call: Callable[..., Any] = lambda self, place, layer, x: layer(x),
        end: Callable[..., Any] = lambda self, x: x,
        **parts: Any,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(place) for place in range(NUM_LAYERS))
        self.call, self.end = call, end
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        for place, layer in enumerate(self.layers):
            x = self.call(self, place, layer, x)
        return self.end(self, x)


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None


def recalls(monkeypatch: pytest.MonkeyPatch) -> list[RecalledModules]:
    """Returns a list of what traces recall from now on."""
    found: list[RecalledModules] = []

    @contextmanager
    def noting(model: nn.Module) -> Iterator[RecalledModules]:
        with recalled_modules(model) as recalled:
            found.append(recalled)
            yield recalled

    monkeypatch.setattr(program, "recalled_modules", noting)
    return found


def counting(self: Any, x: Tensor) -> Tensor:
    global count
    count = (count + 1) % NUM_LAYERS
    return self.inner(x) * count


def appending(self: Any, x: Tensor) -> Tensor:
    self.seen.append(1)
    return self.inner(x) * len(self.seen)


def drawing(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * GENERATOR.random()


def stashing(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x)
    self.seen.append(y)
    return self.norm(y)


def with_autocast(self: Any, place: int, layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=place % 2 == 0):
        return layer(x).float()


def with_grad(self: Any, place: int, layer: nn.Module, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(place % 2 == 1):
        return x + layer(x)


def setting(self: Any, place: int, layer: Any, x: Tensor) -> Tensor:
    self.shared.scale = place
    x = layer(x)
    self.shared.scale = 0
    return x


def setting_list(self: Any, place: int, layer: Any, x: Tensor) -> Tensor:
    self.shared[0] = place
    x = layer(x)
    self.shared[0] = 0
    return x


def asking(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return self.inner(x) if bool(mask.all()) else self.norm(x)


def on_two_lines(self: Any, place: int, layer: Any, x: Tensor) -> Tensor:
    if place >= 2:
        return layer(x)
    return layer(x) * 1


def frozen(place: int) -> nn.Module:
    return Layer().requires_grad_(place % 2 == 0)


def tied(place: int) -> nn.Module:
    layer = Layer(lambda self, x: self.inner(x) + self.other(x), other=nn.Linear(12, 12))
    if place % 2:
        layer.other.weight = layer.inner.weight
    return layer


def hooked(place: int) -> nn.Module:
    layer = Layer()
    if place == 2:
        layer.inner.register_forward_hook(lambda module, args, result: 2 * result)
    return layer


def evaluating(place: int) -> nn.Module:
    return Layer().train(place != 1)


def to_pair(self: Any, place: int, layer: nn.Module, x: Tensor) -> Tensor:
    pair = layer(Pair(x, None), {"y": x, "rate": 2})
    return pair.first + pair.second


GENERATOR = numpy.random.default_rng(0)
COUNTER = itertools.count()
SHARED = SimpleNamespace(scale=0)
LIST = [0]
SEEN: list[Any] = []
RECALLED: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "sequential": lambda: nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))),
    "numbered": lambda: Stack(lambda place: Layer(number=place)),
    "own objects": lambda: Stack(
        lambda place: Layer(lambda self, x: self.inner(x) * self.config["rate"], config={"rate": 2})
    ),
    "bound method": lambda: Stack(lambda place: bound(Layer())),
    "batch norm": lambda: Stack(
        lambda place: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(12, 12))
    ),
    "pairs": lambda: Stack(
        lambda place: Layer(lambda self, pair, more: Pair(self.inner(pair.first), more["y"] * more["rate"])), to_pair
    ),
    "argument returned": lambda: Stack(
        lambda place: Layer(lambda self, x: (x, self.inner(x), None)), lambda self, place, layer, x: sum(layer(x)[:2])
    ),
    "transposed": lambda: Stack(lambda place: Layer(lambda self, x: self.inner(x).transpose(0, 1).transpose(0, 1) + x)),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 2, 12, batch_first=True), NUM_LAYERS, enable_nested_tensor=False
    ),
    "lines": lambda: Stack(call=on_two_lines),
}
CALLED: dict[str, Callable[[], nn.Module]] = {
    "numbers read": lambda: Stack(lambda place: Layer(lambda self, x: self.inner(x) * self.number, number=place)),
    "rates": lambda: Stack(lambda place: Layer(lambda self, x: self.norm(self.inner(x)) + place)),
    "dropout": lambda: Stack(lambda place: nn.Sequential(nn.Linear(12, 12), nn.Dropout(place / 10), nn.ReLU())),
    "global": lambda: Stack(lambda place: Layer(counting)),
    "appended": lambda: Stack(lambda place: Layer(appending, seen=SEEN)),
    "generator": lambda: Stack(lambda place: Layer(drawing)),
    "counter": lambda: Stack(lambda place: Layer(lambda self, x: self.inner(x) * next(COUNTER))),
    "object set": lambda: Stack(
        lambda place: Layer(lambda self, x: self.inner(x) * self.shared.scale, shared=SHARED), setting, shared=SHARED
    ),
    "list set": lambda: Stack(
        lambda place: Layer(lambda self, x: self.inner(x) * self.shared[0], shared=LIST), setting_list, shared=LIST
    ),
    "argument": lambda: Stack(
        lambda place: Layer(lambda self, x, rate: self.inner(x) * rate), lambda self, place, layer, x: layer(x, place)
    ),
    "asking": lambda: Stack(
        lambda place: Layer(asking),
        lambda self, place, layer, x: layer(x, torch.arange(8) >= (0 if place % 2 else 1)),
    ),
    "in place": lambda: Stack(
        lambda place: Layer(lambda self, x: self.inner(x.mul_(2))), lambda self, place, layer, x: layer(x * 1)
    ),
    "view": lambda: Stack(lambda place: Layer(lambda self, x: x.view(-1, 8, 12))),
    "outer weight": lambda: Stack(
        lambda place: Layer(lambda self, x: self.inner(x) @ WEIGHT), end=lambda self, x: x @ self.w, w=WEIGHT
    ),
    "python draws": lambda: Stack(lambda place: Layer(lambda self, x: self.inner(x) * random.random())),
    "cut points": lambda: Stack(lambda place: nn.Sequential(nn.Linear(12, 12), CutPoint(), nn.ReLU())),
    "drawn constant": lambda: Stack(lambda place: Layer(lambda self, x: self.inner(x) * torch.tensor([2.0, 3.0] * 6))),
}
SOME: dict[str, Callable[[], nn.Module]] = {
    "autocast": lambda: Stack(call=with_autocast),
    "gradients": lambda: Stack(call=with_grad),
    "frozen": lambda: Stack(frozen),
    "tied": lambda: Stack(tied),
    "hooked": lambda: Stack(hooked),
    "evaluating": lambda: Stack(evaluating),
    "dtypes": lambda: Stack(
        lambda place: Layer().to(torch.float64 if place % 2 else torch.float32),
        lambda self, place, layer, x: layer(x.to(layer.inner.weight.dtype)),
    ),
    "shapes": lambda: Stack(
        lambda place: Layer(lambda self, x: self.inner(x) * x.shape[1]),
        lambda self, place, layer, x: layer(x if place % 2 else x[:, 1:]),
    ),
}
WEIGHT = nn.Parameter(torch.ones(12, 12))


def bound(layer: Layer) -> Layer:
    layer.act = layer.inner.forward
    layer.how = lambda_bound
    return layer


def lambda_bound(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.act(x))


def reset() -> None:
    """Puts the state that layers share back to where it begins."""
    global count
    count, SHARED.scale, LIST[0] = 0, 0, 0
    global GENERATOR, COUNTER
    GENERATOR, COUNTER = numpy.random.default_rng(0), itertools.count()
    SEEN.clear()


@pytest.mark.parametrize("name", [*RECALLED, *CALLED, *SOME])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_trace_that_recalls_is_the_one_that_calls(name: str, needs_gradient: bool) -> None:
    make, x = (RECALLED | CALLED | SOME)[name], X.clone().requires_grad_(needs_gradient)
    reset()
    with no_modules_recalled():
        expected = with_reads(make(), x)
    reset()
    assert with_reads(make(), x) == expected


def with_reads(model: nn.Module, x: Tensor) -> object:
    """Returns what a trace says and has read, or the error that it raises."""
    try:
        found = traced(model, x)
    except TraceError as error:
        return str(error)
    return described(found), found.reads


@pytest.mark.parametrize("name", RECALLED)
def test_layers_that_are_alike_are_recalled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recalls(monkeypatch)
    traced(RECALLED[name](), X.clone().requires_grad_())
    assert found[-1].num_recalled >= NUM_LAYERS - 1
    assert not found[-1].is_doubtful


@pytest.mark.parametrize("name", CALLED)
def test_layers_that_differ_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recalls(monkeypatch)
    outcome(CALLED[name](), X)
    assert found[-1].num_recalled == 0


def test_a_trace_whose_layers_let_out_what_is_inside_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outside: list[Tensor] = []

    class Cache:
        __slots__ = ()

        def put(self, x: Tensor) -> None:
            outside.append(x)

    def letting_out(self: Any, x: Tensor) -> Tensor:
        y = self.inner(x)
        Cache().put(y)
        return self.norm(y)

    model = Stack(lambda place: Layer(letting_out), end=lambda self, x: (x, sum(outside[-NUM_LAYERS:])))
    with no_modules_recalled():
        expected = outcome(model, X)
    outside.clear()
    found = recalls(monkeypatch)
    assert outcome(model, X) == expected
    assert found[0].num_recalled > 0
    assert found[0].is_doubtful


def test_a_debugger_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found, before = recalls(monkeypatch), sys.gettrace()

    def debugger(frame: Any, event: str, argument: Any) -> None:
        return None

    sys.settrace(debugger)
    try:
        traced(Stack(), X)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert found[-1].num_recalled == 0
