"""A trace that computes something else than its model is an error; the look at it leaves nothing behind."""

from __future__ import annotations

import logging
import random
from collections import deque
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.verify.eager_vs_graph import compare, distance
from tests.graph.models import CPU, Function, traced

X = torch.linspace(-1, 1, 48).reshape(4, 12)


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), *more, nn.Linear(12, 12))


def look(model: nn.Module, trace: TracedModel | None = None) -> None:
    """Compares; a comparison that cannot be made is an error, too."""
    messages: list[str] = []
    logger = logging.getLogger("autovaruna.graph.verify.eager_vs_graph")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        compare(trace or traced(model, X), model, [X], CPU)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert not messages


def broken(model: nn.Module, old: Any, new: Any) -> TracedModel:
    """Returns a trace in which one operation is another."""
    trace = traced(model, X)
    for node in trace.module.graph.nodes:
        node.target = new if node.target == old else node.target
    return trace


def test_a_broken_trace_is_found_and_where() -> None:
    model = net(nn.ReLU(), nn.Linear(12, 12))
    trace = broken(model, torch.ops.aten.relu.default, torch.ops.aten.sin.default)
    with pytest.raises(TraceError, match=r"by the trace and .* by the model.*The first module .* is 2, a ReLU\."):
        look(model, trace)


def test_nan_by_one_way_alone_is_found() -> None:
    model = net(nn.ReLU())
    with pytest.raises(TraceError, match="is nan by the trace"):
        look(model, broken(model, torch.ops.aten.relu.default, torch.ops.aten.log.default))


def test_a_small_difference_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("autovaruna"), "propagate", True)
    model = net(nn.ReLU())
    trace = traced(model, X)
    bias: Any = model[-1].bias
    trace.constants["3.bias"] = bias.detach() * (1 + 1e-4)  # in place of the parameter
    compare(trace, model, [X], CPU)
    assert "Training goes on" in caplog.text


class Noisy(nn.Module):
    """Draws in every way that a trace keeps."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(12) * torch.bernoulli(torch.full((12,), 0.5))
        return x + torch.empty(12).uniform_() + F.rrelu(x, training=True)


@pytest.mark.parametrize(
    "part", [Noisy, lambda: nn.BatchNorm1d(12), lambda: nn.Dropout(0.5), lambda: nn.AlphaDropout()]
)
@pytest.mark.parametrize("is_training", [True, False])
def test_random_numbers_and_statistics_are_no_difference(part: Any, is_training: bool) -> None:
    look(net(part()).train(is_training))


def test_a_module_that_draws_from_python_is_no_difference() -> None:
    def noisy(self: Any, x: Tensor) -> Tensor:
        return x * random.random() + float(numpy.random.rand())

    look(net(Function(noisy)))


class Marking(nn.Module):
    """Leaves something in every place that a forward can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.seen = nn.BatchNorm1d(12), nn.Dropout(0.5), deque([1])
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        self.last = x.detach()
        out: Tensor = self.drop(self.norm(x))
        return out


def test_it_leaves_nothing_behind() -> None:
    model = net(Marking())
    trace = traced(model, X)
    marking: Any = model[2]
    marking.seen.clear()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[union-attr]
    look(model, trace)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[union-attr]
    assert (len(marking.seen), marking.last) == (0, None)


def test_what_rounding_does_is_no_difference() -> None:
    """The last bits of a sum are all that is left of numbers that cancel out."""
    model = Function(
        lambda self, x: (x @ self.weight).sum(1) - (x @ self.weight.flip(1)).sum(1),
        weight=nn.Parameter(X.T[:, :4].clone()),
    )
    trace = broken(model, torch.ops.aten.flip.default, torch.ops.aten.clone.default)
    for node in trace.module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        node.args = node.args[:1]
    look(model, trace)


def test_distances() -> None:
    one = torch.tensor([1.0, 4.0])
    assert distance(one, one.clone()) == 0.0
    assert distance(one, torch.tensor([1.0, 3.0])) == pytest.approx(1 / 3)
    assert distance(one, one.double()) == torch.inf
    assert distance(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0])) == 0.0
    assert distance(torch.tensor([torch.inf, 1.0]), torch.tensor([-torch.inf, 1.0])) == torch.inf
    assert distance(torch.tensor([3]), torch.tensor([4])) == 0.25


class State:
    """Holds what a call leaves, by the class until then."""

    last: Tensor | None = None


class Carrying(nn.Module):
    """Adds what its last call has left to what it gives, if there is something: an attribute, or in another object."""

    def __init__(self, is_read: bool, where: str = "own") -> None:
        super().__init__()
        self.layer, self.is_read, self.where = nn.Linear(12, 12), is_read, where
        self.last: Any = None
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        known = self.state.last if self.where == "state" else self.last
        known = known[0] if isinstance(known, tuple) else known
        out: Tensor = self.layer(x + known if self.is_read and known is not None else x)
        if self.where == "state":
            self.state.last = out.detach()
        else:
            self.last = (out.detach(), 1) if self.where == "tuple" else out.detach()
        return out


@pytest.mark.parametrize(("where", "name"), [("own", "last"), ("state", "state.last"), ("tuple", "last")])
def test_samples_that_the_first_call_leaves_for_the_next_are_found(where: str, name: str) -> None:
    """Once, a state of as many samples as the batch has, empty before the first call, stayed empty."""
    with pytest.raises(TraceError, match=f"its next call computes something else: got changes of {name},"):
        look(Carrying(is_read=True, where=where))
    look(Carrying(is_read=False, where=where))
