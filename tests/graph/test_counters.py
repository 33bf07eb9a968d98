"""Counters that weigh state of samples change with it, once a micro-batch; all others once a call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.graph.models import traced


class Base(nn.Module):
    """Has a running average, a count of its changes, a count of calls, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))


class Corrected(Base):
    """Corrects the average by the count of its changes."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.average.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.average / (1 - 0.9**self.count)).sum(-1).mean()


class CorrectedApart(Base):
    """Does the same in a region without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.count += 1
            self.average.lerp_(x.mean(0), 0.1)
            mean = self.average / (1 - 0.9**self.count)
        return self.layer(x - mean).sum(-1).mean()


class Cumulative(Base):
    """Weighs what comes new by the count."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
            self.calls += 1
            self.average += (x.mean(0) - self.average) / self.count
        return self.layer(x - self.average).sum(-1).mean()


class Beside(Base):
    """Counts beside an average, and follows its own weights; neither has to do with the average."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(self.layer)
        self.slow = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.slow.weight.mul_(0.9).add_(self.norm.weight, alpha=0.1)
        x = self.slow(self.norm(self.layer(x * torch.tanh(self.calls))))
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return (x * self.average).sum(-1).mean()


VECTORS = {f"layer.parametrizations.weight.0.{name}" for name in ("_u", "_v")}


@pytest.mark.parametrize(
    "model, steady",
    [
        (Corrected, {"calls"}),
        (CorrectedApart, {"calls"}),
        (Cumulative, {"calls"}),
        (Beside, {"calls", "slow.weight", "norm.num_batches_tracked", *VECTORS}),
    ],
)
def test_a_counter_goes_with_the_state_that_it_weighs(model: type[nn.Module], steady: set[str]) -> None:
    assert traced(model(), torch.randn(4, 3)).steady_state == steady
