"""Counts of several samples: a model whose results depend on them is refused, one that only goes by them trains."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, TraceError
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.verify.by_parts import Parts
from tests.graph.models import CPU, traced
from tests.reference import sgd
from tests.session.training import QUIET, Setup, on_ranks

WIDTH, CLASSES, SIZE = 6, 4, 12
Way = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Returns the loss of what a function makes of samples (batch, WIDTH) and numbers (batch,)."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.numbers, self.last, self.norm = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, CLASSES), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(40))

    def forward(self, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.way(self, x, n)), y)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    n = torch.randint(1, 20, (SIZE,), generator=g)
    return torch.randn(SIZE, WIDTH, generator=g), n, torch.randint(CLASSES, (SIZE,), generator=g)


def try_out(way: Way) -> TracedModel:
    """Traces a model, and runs it on a batch and on parts of it."""
    model = Model(way)
    found = traced(model, *batch())
    Parts(found, model, batch(), SIZE, CPU, share=lambda part: part).compare()
    return found


def median(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return x + self.numbers((n - n.median()).abs())


def rank(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return x + self.numbers(n.argsort().argsort())


def in_order(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return x + self.numbers(n.sort(0)[0])


def neighbour(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return x + self.numbers(n.roll(1, 0))


def frequency(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return x / torch.bincount(n, minlength=40)[n].unsqueeze(1)


def best_half(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """Goes by numbers of its own."""
    scores = self.experts[0](x).sum(1)
    return x * (scores.detach().argsort().argsort() < x.shape[0] // 2).unsqueeze(1)


def routed(self: nn.Module, x: Tensor, room: int) -> Tensor:
    """Gives samples to experts, of which each takes no more than it has room for."""
    chosen = F.one_hot(self.experts[0](x)[:, :3].argmax(1), 3)
    place = chosen.cumsum(0) * chosen
    taken = chosen * (place <= room)
    return sum((taken[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts)), x)


def full_experts(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return routed(self, x, 2)


def dropped(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """Draws numbers, too."""
    return F.dropout(x, 0.5) + torch.rand_like(x) * self.numbers(n.argsort().argsort())


@pytest.mark.parametrize(
    "way",
    (median, rank, in_order, neighbour, frequency, best_half, full_experts, dropped),
    ids=lambda way: way.__name__,
)
def test_counts_of_several_samples_that_change_results_are_refused(way: Way) -> None:
    with pytest.raises(TraceError, match=r"(?s)what it counts over them at .*test_joined_counts.py"):
        try_out(way)


def roomy_experts(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return routed(self, x, SIZE)


def sorted_and_back(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """Goes through samples by their lengths, as packed sequences do."""
    lengths, order = n.sort(descending=True)
    return (self.experts[0](x[order]) / lengths.unsqueeze(1))[order.argsort()]


def together(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """Brings the samples of an expert together, with dropout, noise and statistics of the batch."""
    order = (n % 3).argsort()
    noise = torch.rand_like(x)
    h = F.dropout(self.norm(x), 0.5) + noise
    found = torch.stack([expert(h[order]) for expert in self.experts], 1)
    return found[order.argsort(), n % 3]


@pytest.mark.parametrize("way", (roomy_experts, sorted_and_back, together), ids=lambda way: way.__name__)
def test_counts_that_only_say_where_samples_go_are_not(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autovaruna"):
        found = try_out(way)
    assert found.joins_counts
    assert "counts over the samples" not in caplog.text


def test_ranks_try_out_what_they_will_train() -> None:
    with pytest.raises(TraceError, match="what it counts over them"):
        AutoVaruna(Model(rank), num_micro_batches=2, **QUIET)(*batch())


def test_what_each_rank_passes_stands_for_the_global_batch() -> None:
    """Samples of one rank alone are too few to tell."""

    def first_eight(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
        return x * (n.argsort().argsort() < 8).unsqueeze(1)

    def call(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> None:
        with pytest.raises(TraceError, match="what it counts over them"):
            model(*(each.tensor_split(2)[rank] for each in batch()))

    on_ranks(Setup(((0, 1),), 2, settings={"inputs": "per_rank"}), Model(first_eight), call, sgd)


def test_one_micro_batch_may_count_as_it_likes() -> None:
    model = Model(rank)
    expected = model(*batch()).item()
    assert AutoVaruna(model, num_micro_batches=1, **QUIET)(*batch()).item() == expected


def test_what_cannot_be_tried_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def follows(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(F.one_hot(n, 40).sum(0))
        return x[n.argsort()] * self.seen.sum()

    with caplog.at_level(logging.WARNING, "autovaruna"):
        try_out(follows)
    assert "could not be tried out (it changes buffers by its samples" in caplog.text
