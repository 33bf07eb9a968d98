"""Holds what forward changes besides outputs: once a micro-batch if it follows from samples, else once a call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autovaruna import AutoVaruna, TraceError
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import compare, part, plain_micro_batched, ranges
from tests.session.training import QUIET, Setup, pipeline, train

SIZE, STEPS = 6, 2


class Layers(nn.Module):
    """Has two layers, a slow copy of the first that nobody trains, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slow, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.slow.requires_grad_(False)
        self.register_buffer("scale", torch.ones(WIDTH))


class Scaled(Layers):
    """Divides by a running scale, of which autograd keeps what it was."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.abs().mean(0))
        return F.cross_entropy(self.last(torch.tanh(x / self.scale.detach()) * self.scale), y)


class Followed(Layers):
    """Has a copy of its weights follow them in forward, and trains towards what that says."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            slow.data = slow.data * 0.5 + fast.data * 0.5
        wanted = self.slow(x)
        return F.cross_entropy(self.last(torch.tanh(self.first(x))), y) + F.mse_loss(self.first(x), 2.0 * wanted)


class Shrunk(Layers):
    """Shrinks a weight that is trained, before and after it is used."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.first.weight.data.mul_(0.9)
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.first.bias.mul_(0.9)
        return F.cross_entropy(self.last(x), y)


class Normed(Layers):
    """Turns the vectors of a spectral normalisation, and counts its calls before and after that enters the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.last = parametrizations.spectral_norm(self.last)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = 1.0 + self.calls
        self.calls += 0.5
        return F.cross_entropy(self.last(torch.tanh(self.first(x) * before)), y) * self.calls


class Twofold(Layers):
    """Lets an average follow another, which follows from samples, and counts calls beside that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("far", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.calls += 1
            self.far.lerp_(self.scale, 0.1)
            self.scale.mul_(0.5).add_(x.abs().mean(0))
        return F.cross_entropy(self.last(torch.tanh(x / self.far.detach())), y)


class Corrected(Layers):
    """Corrects an average of samples by the count of its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.count += 1
            self.scale.lerp_(x.abs().mean(0), 0.1)
        return F.cross_entropy(self.last(torch.tanh(x / (self.scale / (1 - 0.9**self.count)))), y)


class Taught(Layers):
    """Learns from a teacher in training mode, whose batch normalisation changes its statistics under ``no_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        x = torch.tanh(self.first(x))
        return F.cross_entropy(self.last(x), y) + (x - taught).square().mean()


class Averaged(nn.Module):
    """Subtracts a mean of all that it has seen, which its count of calls weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))  # the reference counts calls in integers alone

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 1.0 / self.calls.item())
        return x - self.mean


class WithAveraged(Layers):
    """Has such a module."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = Averaged()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.slow(self.first(x)))), y)


MODELS = (Scaled, Twofold, Corrected, Followed, Shrunk, Normed, Taught, WithAveraged)
STEADY = (Followed, Shrunk, Normed)
"""Models that change nothing by what is in the samples."""


def case_of(model: type[nn.Module]) -> Case:
    """Returns a case whose micro-batches change what the next one finds."""
    return Case(model.__name__.lower(), model, labelled, has_batch_norm=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_changes_state_as_one_process_does(model: type[nn.Module], recompute: bool) -> None:
    case = case_of(model)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    bounds = ranges(SIZE, 1 if model in STEADY else 3)
    plain = plain_micro_batched(case, [[part(batch, *each) for each in bounds] for batch in batches])
    compare(train(case, pipeline(2, recompute=recompute), batches), plain)
    compare(train(case, pipeline(2, recompute=recompute, shares=(0.99,)), batches), plain)


@pytest.mark.parametrize("model", MODELS)
def test_replicas_follow_the_first(model: type[nn.Module]) -> None:
    """Ranks agree after each step on what each has changed; parts with such state can be measured."""
    case = case_of(model)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    record = train(case, Setup(((0, 1), (2,))), batches)
    assert all(value.isfinite().all() for value in record.weights.values())
    AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**batches[0][1]).backward()


class Judged(nn.Linear):
    """Branches on numbers, and shrinks its weight past autograd."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Between(Layers):
    """Has such a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Judged(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.first(x)), y)


def test_a_module_that_is_kept_whole_may_not_change_its_parameters() -> None:
    """Neither a later micro-batch nor a recompute would know."""
    with pytest.raises(TraceError, match="cannot be traced at"):
        AutoVaruna(Between(), num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])
