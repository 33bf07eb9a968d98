"""Samples that meet where no shape says so: each way is refused with its line; what only looks like one is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.graph.trace import trace
from tests.graph.models import CPU, Function, call_of

WIDTH, LENGTH = 6, 5
X = torch.zeros(3, LENGTH, WIDTH)


def model(function: Callable[..., Tensor]) -> Function:
    """Returns a model that is a function of ``(self, x)`` with layers of its own."""
    parts = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WIDTH), "mean": torch.zeros(WIDTH)}
    return Function(function, attention=nn.TransformerEncoderLayer(WIDTH, 2, 8), **parts)


def attention(self: nn.Module, x: Tensor) -> Tensor:
    """Takes the first dimension for time, as layers of torch do unless batch_first=True."""
    return self.attention(x)


def convolution(self: nn.Module, x: Tensor) -> Tensor:
    return F.conv1d(x.permute(1, 2, 0), torch.ones(WIDTH, WIDTH, 3), padding=1)


def softmax(self: nn.Module, x: Tensor) -> Tensor:
    return self.first(x).softmax(0)


def cumulated(self: nn.Module, x: Tensor) -> Tensor:
    return self.first(x).cumsum(0)


def turned(self: nn.Module, x: Tensor) -> Tensor:
    return self.first(x) + x.flip(0)


def pooled(self: nn.Module, x: Tensor) -> Tensor:
    return F.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1)


def limited(self: nn.Module, x: Tensor) -> Tensor:
    """Limits the norm of each channel over all samples."""
    return torch.renorm(self.first(x), 2, 2, 0.5)


def instances(self: nn.Module, x: Tensor) -> Tensor:
    """Normalises each channel over all samples."""
    return F.instance_norm(self.first(x).permute(1, 2, 0))


def scaled(self: nn.Module, x: Tensor) -> Tensor:
    return self.last(x) / self.first(x).norm()


def against_the_first(self: nn.Module, x: Tensor) -> Tensor:
    return self.last(x) - x[0]


def covariance(self: nn.Module, x: Tensor) -> Tensor:
    flat = self.first(x).flatten(0, 1)
    return flat @ (flat.t() @ flat)


def one_bag(self: nn.Module, x: Tensor) -> Tensor:
    return self.last(self.first(x).amax(0)).square().mean()


def shifted(self: nn.Module, x: Tensor) -> Tensor:
    return self.first(x).flatten(0, 1)[:-1].square().mean()


def backwards(self: nn.Module, x: Tensor) -> Tensor:
    return self.last(x)[torch.arange(x.shape[0] - 1, -1, -1)]


def crosswise(self: nn.Module, x: Tensor) -> Tensor:
    return self.first(x) * self.last(x).index_select(0, (torch.arange(x.shape[0]) + 1) % x.shape[0])


def named(self: nn.Module, x: Tensor) -> Tensor:
    """Picks rows by numbers in the inputs."""
    return self.last(x) + self.first(x)[x[:, 0, 0].long()]


def sent(self: nn.Module, x: Tensor) -> Tensor:
    """Adds rows to others that the inputs name."""
    return self.last(x).index_add(0, x[:, 0, 0].long().clamp(min=0), self.first(x))


def permuted(self: nn.Module, x: Tensor) -> Tensor:
    return self.last(0.7 * x + 0.3 * x[torch.randperm(x.shape[0])])


MIXING = (
    *(attention, convolution, softmax, cumulated, turned, pooled, limited, instances, scaled, against_the_first),
    *(covariance, one_bag, shifted, backwards, crosswise, named, sent, permuted),
)


@pytest.mark.parametrize("function", MIXING, ids=lambda function: function.__name__)
def test_samples_that_meet_are_refused(function: Callable[..., Tensor]) -> None:
    """The error says what to do; for one batch size, which a user may ask for, the model is traced as it is."""
    with pytest.raises(TraceError, match=r"mixes the samples of a batch: .*batch_first=True.*dynamic_batch=False"):
        trace(model(function), call_of(model(function), X), CPU)
    trace(model(function), call_of(model(function), X), CPU, is_dynamic=False, micro_batch_size=3)


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


def alike(self: nn.Module, x: Tensor) -> Tensor:
    """Takes the kind of one value for another."""
    return x + self.last.bias.to(x) + self.mean.type_as(x)


def centred(self: nn.Module, x: Tensor) -> Tensor:
    """Uses a mean of the inputs alone: it is computed over the whole batch before the step."""
    return self.last(x - x.mean(0))


def in_turn(self: nn.Module, x: Tensor) -> Tensor:
    """Picks rows by numbers that follow from the size of the batch: each sample's own, one and several times."""
    numbers = torch.arange(x.shape[0])
    flat = self.first(x).flatten(0, 1)
    last = flat[numbers * LENGTH + LENGTH - 1] + self.last(x)[numbers, 0]
    return (
        last[torch.arange(2 * x.shape[0]) // 2]
        * x[numbers.repeat_interleave(2), torch.randint(LENGTH, (2 * x.shape[0],))]
    )


def ends(self: nn.Module, x: Tensor) -> Tensor:
    """Takes the last place of each sample, which the inputs say, and any other, out of all places of all samples."""
    last = (x[:, :, 0] > 0).sum(1).clamp(max=LENGTH - 1)
    any_ = torch.randint(LENGTH, (x.shape[0],))
    flat = self.last(x).flatten(0, 1)
    return flat[torch.arange(x.shape[0]) * LENGTH + last] + flat[torch.arange(x.shape[0]) * LENGTH + any_]


@pytest.mark.parametrize(
    "function",
    (ends, auxiliary, chosen, lengths, followed, joined, alike, centred, in_turn),
    ids=lambda function: function.__name__,
)
def test_samples_that_go_alone_are_not(function: Callable[..., Tensor]) -> None:
    assert trace(model(function), call_of(model(function), X), CPU).sizes.symbol is not None


def test_samples_that_meet_behind_a_batch_norm_are_refused() -> None:
    """What it returns is of the samples, though it changes buffers; its own mean is one of a micro-batch."""

    def normal(self: nn.Module, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2))

    def centred_behind_it(self: nn.Module, x: Tensor) -> Tensor:
        return normal(self, x) - normal(self, x).mean(0)

    norm = nn.BatchNorm1d(WIDTH)
    trace(Function(normal, norm=norm), call_of(Function(normal, norm=norm), X), CPU)
    with pytest.raises(TraceError, match="made of several samples, meets each sample"):
        trace(Function(centred_behind_it, norm=norm), call_of(Function(centred_behind_it, norm=norm), X), CPU)
