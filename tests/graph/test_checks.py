"""Graphs are compared with their models; samples that meet are refused; outputs are told apart."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from inspect import signature
from typing import Any
from unittest import TestCase

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.evidence.verify import compare
from autovaruna.graph.export.run import TraceOptions
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import OutputKind, TracedModel
from tests.catalogue.small import Written
from tests.graph.models import CPU, call_of, traced, traced_function

X = torch.linspace(-1, 1, 48).reshape(4, 12)
WIDTH, LENGTH = 6, 5
SEQUENCES = torch.zeros(3, LENGTH, WIDTH)
ROWS = torch.zeros(3, 4)
LOSS, SAMPLES, MEAN, TOTAL, SAME = OutputKind


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), *more, nn.Linear(12, 12))


def look(model: nn.Module, trace: TracedModel | None = None) -> None:
    """Compares; a comparison that cannot be made is an error, too."""
    with TestCase().assertNoLogs("autovaruna.evidence.verify", logging.INFO):
        compare(trace or traced(model, X), model, [X], CPU)


BROKEN = {
    torch.ops.aten.sin.default: r"by the trace and .* by the model.*The first module .* is 2, a ReLU\.",
    torch.ops.aten.log.default: "is nan by the trace",
}


@pytest.mark.parametrize(("other", "words"), BROKEN.items())
def test_a_trace_with_another_operation_is_found_and_where(other: Any, words: str) -> None:
    model = net(nn.ReLU(), nn.Linear(12, 12))
    trace = traced(model, X)
    next(node for node in trace.module.graph.nodes if node.target == torch.ops.aten.relu.default).target = other
    with pytest.raises(TraceError, match=words):
        look(model, trace)


def test_a_small_difference_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("autovaruna"), "propagate", True)
    model = net(nn.ReLU())
    trace = traced(model, X)
    bias: Any = model[-1].bias
    trace.constants["3.bias"] = bias.detach() * (1 + 1e-4)  # in place of the parameter
    compare(trace, model, [X], CPU)
    assert "Training goes on" in caplog.text


def noisy(self: Any, x: Tensor) -> Tensor:
    """Draws in every way that a trace keeps."""
    x = F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(12) * torch.bernoulli(torch.full((12,), 0.5))
    return x + torch.empty(12).uniform_() + F.rrelu(x, training=True)


BY_PYTHON = Written(lambda self, x: x * random.random() + float(numpy.random.rand()))


@pytest.mark.parametrize("part", (Written(noisy), BY_PYTHON, nn.BatchNorm1d(12), nn.Dropout(0.5), nn.AlphaDropout()))
@pytest.mark.parametrize("is_training", [True, False])
def test_random_numbers_and_statistics_are_no_difference(part: nn.Module, is_training: bool) -> None:
    look(net(part).train(is_training))


def mark(self: Any, x: Tensor) -> Tensor:
    """Leaves something in every place that a forward can reach."""
    self.seen.append(1)
    self.last = x.detach()
    return self.drop(self.norm(x))


def test_it_leaves_nothing_behind() -> None:
    marking: Any = Written(mark, norm=nn.BatchNorm1d(12), drop=nn.Dropout(0.5), seen=deque([1]), last=None)
    model = net(marking)
    trace = traced(model, X)
    marking.seen.clear()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    look(model, trace)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert (len(marking.seen), marking.last) == (0, None)


class Kept:
    """Is given what forward counts."""


SEEN: list[int] = []
Count = Callable[..., int]


def in_attribute(owner: Any) -> int:
    owner.calls = getattr(owner, "calls", 0) + 1
    return int(owner.calls)


def in_list(self: Any) -> int:
    SEEN.append(1)
    return len(SEEN)


def in_default(self: Any, seen: list[int] = [0]) -> int:  # noqa: B006
    seen[0] += 1
    return seen[0]


def counting(count: Count, most: int = 4) -> nn.Module:
    """Gives twice as much once it has been called some times."""
    return Written(lambda self, x: self.layer(x) * (2 if count(self) > most else 1), layer=nn.Linear(12, 12))


COUNTS: dict[str, tuple[Count, str]] = {
    "an attribute": (in_attribute, "calls"),
    "of a class": (lambda self: in_attribute(Kept), ".*Kept.calls"),
    "of a function": (lambda self: in_attribute(in_list), ".*in_list.*calls"),
    "of a weight": (lambda self: in_attribute(self.layer.weight), "layer.weight.calls"),
    "a list": (in_list, ".*SEEN"),
    "a default": (in_default, ".*in_default.*"),
}


@pytest.mark.parametrize("what", COUNTS)
def test_what_calls_count_in_python_is_found_before_it_makes_a_difference(what: str) -> None:
    """Once, only what makes one in the second call was."""
    count, name = COUNTS[what]
    with pytest.raises(TraceError, match=f"next call computes something else: got changes of {name},"):
        look(counting(count))
    assert not SEEN and not hasattr(Kept, "calls") and not hasattr(in_list, "calls")


def test_what_they_count_far_away_is_told(caplog: pytest.LogCaptureFixture) -> None:
    look(counting(in_list, most=1000))
    assert "each call of forward changes tests.graph.test_checks:SEEN" in caplog.text


def model(function: Callable[..., Tensor]) -> Written:
    """Returns a model that is a function of ``(self, x)`` with layers of its own."""
    parts = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WIDTH), "mean": torch.zeros(WIDTH)}
    return Written(function, attention=nn.TransformerEncoderLayer(WIDTH, 2, 8), **parts)


def halved(self: nn.Module, x: Tensor) -> Tensor:
    """Goes by the whole batch only once a number of it is large."""
    h: Tensor = self.first(x)
    return torch.where(h.abs().max() > 1e4, h * 0.5, h)


def without_outliers(self: nn.Module, x: Tensor) -> Tensor:
    h: Tensor = self.first(x)
    return torch.where(h.abs() > 9 * h.std(), torch.zeros_like(h), h)


def of_the_best(self: nn.Module, x: Tensor) -> Tensor:
    heads = torch.stack([self.first(x), self.last(x)])
    return heads.index_select(0, torch.stack([each.square().mean() for each in heads]).argmin().view(1))[0]


MIXING: dict[str, Callable[..., Tensor]] = {
    "attention whose first dimension is time": lambda self, x: self.attention(x),
    "softmax": lambda self, x: self.first(x).softmax(0),
    "each channel normalised over all samples": lambda self, x: F.instance_norm(self.first(x).permute(1, 2, 0)),
    "scaled": lambda self, x: self.last(x) / self.first(x).norm(),
    "against the first": lambda self, x: self.last(x) - x[0],
    "covariance": lambda self, x: (flat := self.first(x).flatten(0, 1)) @ (flat.t() @ flat),
    "one bag": lambda self, x: self.last(self.first(x).amax(0)).square().mean(),
    "shifted": lambda self, x: self.first(x).flatten(0, 1)[:-1].square().mean(),
    "crosswise": lambda self, x: self.first(x) * self.last(x)[(torch.arange(x.shape[0]) + 1) % x.shape[0]],
    "rows picked by numbers in the inputs": lambda self, x: self.last(x) + self.first(x)[x[:, 0, 0].long()],
    "rows sent to others": lambda self, x: self.last(x).index_add(0, x[:, 0, 0].long().clamp(min=0), self.first(x)),
    "by a truth": halved,
    # once, a truth about counts, and a count, were left to the steps that are looked at
    "by whether any is large": lambda self, x: torch.where(((h := self.first(x)) > 1e4).any(), h * 0.5, h),
    "by how many are large": lambda self, x: (h := self.first(x)) / (h > 1e4).sum().clamp(min=1),
    "by a mask": without_outliers,
    "by an index": of_the_best,
    "permuted": lambda self, x: self.last(0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]),
}


@pytest.mark.parametrize("function", MIXING.values(), ids=MIXING)
def test_samples_that_meet_are_refused(function: Callable[..., Tensor]) -> None:
    """The error says what to do; for one batch size, which a user may ask for, the model is traced as it is."""
    with pytest.raises(TraceError, match=r"mixes the samples of a batch: .*batch_first=True.*dynamic_batch=False"):
        traced(model(function), SEQUENCES)
    trace(model(function), call_of(model(function), SEQUENCES), CPU, TraceOptions(is_dynamic=False, micro_batch_size=3))


def centred(h: Tensor) -> Tensor:
    middle = h.mean(0)
    return h - middle


def test_a_line_is_that_of_the_function_it_is_in() -> None:
    """Once it was the line in forward that calls the function."""
    with pytest.raises(TraceError, match=r"meets each sample in sub at .*test_checks\.py:\d+ \(return h - middle\)"):
        traced(model(lambda self, x: self.last(centred(self.first(x)))), SEQUENCES)


def auxiliary(self: nn.Module, x: Tensor) -> Tensor:
    """Adds a loss of how a batch is spread over experts, weighted by a parameter."""
    scores = self.first(x).softmax(-1)
    counts = F.one_hot(scores.argmax(-1), WIDTH).float().mean((0, 1))
    return self.last(x).square().mean() + (counts * scores.mean((0, 1))).sum() * self.last.bias.exp().sum()


def chosen(self: nn.Module, x: Tensor) -> Tensor:
    """Sends what an expert is chosen for through it, sorted."""
    flat = self.first(x).flatten(0, 1)
    experts = flat.argmax(1)
    order = experts.argsort()
    rows = (experts == 1).nonzero().squeeze(1)
    return flat.index_add(0, order, self.last(flat[order])).index_add(0, rows, self.last(flat[rows]))


def lengths(self: nn.Module, x: Tensor) -> Tensor:
    """Cuts by the longest of the batch, and takes one place of each sample."""
    longest = (x[:, :, 0] > 0).sum(1)
    places = torch.arange(LENGTH) < longest.max()
    return self.last(x * places[:, None])[torch.arange(x.shape[0]), longest.clamp(max=LENGTH - 1)]


def followed(self: nn.Module, x: Tensor) -> Tensor:
    """Follows a mean in a buffer, which it assigns, as batch normalisation does."""
    self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1)).detach()
    return self.last(x - self.mean)


def joined(self: nn.Module, x: Tensor) -> Tensor:
    """Joins two batches, and parts them again."""
    left, right = self.first(torch.cat([x, 2.0 * x])).chunk(2)
    return left * right


def ends(self: nn.Module, x: Tensor) -> Tensor:
    """Takes the last place of each sample, which the inputs say, and any other, out of all places of all samples."""
    last = (x[:, :, 0] > 0).sum(1).clamp(max=LENGTH - 1)
    any_ = torch.randint(LENGTH, (x.shape[0],))
    flat = self.last(x).flatten(0, 1)
    return flat[torch.arange(x.shape[0]) * LENGTH + last] + flat[torch.arange(x.shape[0]) * LENGTH + any_]


def drawn(self: nn.Module, x: Tensor) -> Tensor:
    """Chooses by noise that it draws; once, its rows followed from their places in the batch."""
    return F.gumbel_softmax(self.last(x), hard=True) * torch.rand(x.shape[0], 1, 1).log()


@pytest.mark.parametrize(
    "function", (ends, auxiliary, chosen, lengths, followed, joined, drawn), ids=lambda function: function.__name__
)
def test_samples_that_go_alone_are_not(function: Callable[..., Tensor]) -> None:
    assert traced(model(function), SEQUENCES).sizes.symbol is not None


def test_samples_that_meet_behind_a_batch_norm_are_refused() -> None:
    """What it returns is of the samples, though it changes buffers; its own mean is one of a micro-batch."""
    x, norm = SEQUENCES.transpose(1, 2), nn.BatchNorm1d(WIDTH)
    traced_function(lambda self, x: self.norm(x), x, norm=norm)
    with pytest.raises(TraceError, match="made of several samples, meets each sample"):
        traced_function(lambda self, x: self.norm(x) - self.norm(x).mean(0), x, norm=norm)


def returning(make: Any, loss_mode: str = "auto") -> TracedModel:
    """Traces a model that returns what `make` makes of a linear layer's output of shape (3, 4), and of labels."""
    given = (ROWS, torch.zeros(3, dtype=torch.long))[: len(signature(make).parameters)]
    model = Written(lambda self, x, *y: make(self.layer(x), *y), layer=nn.Linear(4, 4))
    return trace(model, call_of(model, *given), CPU, TraceOptions(loss_mode=loss_mode))


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda out: out.mean(), [LOSS]),
        (lambda out: out, [SAMPLES]),
        (lambda out: (out.mean(), out.detach()), [LOSS, SAMPLES]),
        (lambda out: (out.mean(), out), [MEAN, SAMPLES]),
        (lambda out: {"loss": out.mean(), "logits": out}, [LOSS, SAMPLES]),
        (lambda out: (out.mean(), out.sum()), [MEAN, MEAN]),
        (lambda out: {"loss": out.mean(), "other": out.sum()}, [LOSS, MEAN]),
        (lambda out: (out, out.detach().mean(dim=0)), [SAMPLES, MEAN]),
        (lambda out: (out, (out > 0).sum()), [SAMPLES, TOTAL]),
        (lambda out: (out, torch.arange(4)), [SAMPLES, SAME]),
        (lambda out: out.mean().reshape(1), [MEAN]),
        (lambda out: (out.mean(), None, 3), [LOSS]),
        (lambda out, y: (out, F.cross_entropy(out, y)), [SAMPLES, LOSS]),
        (lambda out, y: (F.cross_entropy(out, y), out, out.mean(0)), [LOSS, SAMPLES, MEAN]),
        (lambda out, y: (out, F.cross_entropy(out, y), out.mean()), [SAMPLES, MEAN, MEAN]),
        (lambda out, y: (out * y[:, None], F.cross_entropy(out, y)), [SAMPLES, MEAN]),
    ],
)
def test_kinds(make: Any, kinds: list[OutputKind]) -> None:
    """A lone differentiable scalar, or the one named loss or made of labels, is the loss; others go by their batch."""
    assert [spec.kind for spec in returning(make).outputs] == kinds


def test_outputs_have_a_dimension_of_the_batch_and_the_paths_that_a_person_would_write() -> None:
    (spec,) = returning(lambda out: out.t()).outputs
    assert (spec.kind, spec.dimension, spec.needs_gradient) == (SAMPLES, 1, True)
    outputs = returning(lambda out: {"loss": out.mean(), "more": [out, (out * 2,)]}).outputs
    assert [spec.path for spec in outputs] == ["output['loss']", "output['more'][0]", "output['more'][1][0]"]


@pytest.mark.parametrize(
    ("make", "outer"),
    [
        (lambda out: out, 1),
        (lambda out: out.reshape(-1), 1),
        (lambda out: out.t().reshape(-1), 4),
        (lambda out: out.t().reshape(-1).exp().view(2, -1), 2),
        (lambda out: out.t().reshape(4, -1), 1),
        (lambda out: out.t().reshape(-1).view(2, 2, -1).flatten(1).softmax(0), 2),
        (lambda out: out.t().reshape(-1, 1).repeat(1, 2).max(1)[0], 4),
        (lambda out: torch.cat([out.t().reshape(-1)] * 2), 8),
        (lambda out: out.repeat_interleave(2, 0).repeat(3, 1), 3),
    ],
)
def test_rows_say_how_often_the_samples_come(make: Any, outer: int) -> None:
    """A dimension that was made of features and samples has all samples for each of the features before them."""
    found = returning(make, loss_mode="outputs")
    assert found.outer(found.outputs[0], ()) == outer


def test_rows_of_unknown_order_are_refused() -> None:
    """Behind each other stand the rows of two values, one of which has all samples for each feature."""
    with pytest.raises(TraceError, match="which samples the rows of output"):
        returning(lambda out: torch.cat([out.t().reshape(-1), out.reshape(-1)]), loss_mode="outputs")


def test_the_mode_decides_against_the_shape() -> None:
    """outputs: a lone scalar is no loss; loss: so is the only scalar beside other outputs."""
    assert returning(lambda out: out.mean(), "outputs").loss is None
    for make, path in (
        (lambda out: {"loss": out.mean(), "x": out.sum()}, "output['loss']"),
        (lambda out: {"loss": out.mean(), "x": out}, "output['loss']"),
        (lambda out: (out, out.mean()), "output[1]"),
    ):
        found = returning(make, "loss").loss
        assert found is not None and found.path == path


def test_a_loss_that_is_not_there_is_an_error() -> None:
    """Asked for a loss among outputs that have none, or several, it says what was found."""
    for make in (lambda out: out, lambda out: (out.mean(), out.sum()), lambda out: out.detach().mean()):
        with pytest.raises(TraceError, match=r"loss_mode='loss'.*got \{'output"):
            returning(make, "loss")


def test_an_output_that_is_an_input_or_repeated() -> None:
    """A model may return its input, or a mask: they are samples too, and no block makes them."""
    found = traced_function(lambda self, x: (self.layer(x), x, x > 0), ROWS, layer=nn.Linear(4, 4))
    assert [spec.kind for spec in found.outputs] == [SAMPLES, SAMPLES, SAMPLES]
    assert [spec.node in found.block_of for spec in found.outputs] == [True, False, False]
