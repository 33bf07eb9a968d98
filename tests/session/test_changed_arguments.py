"""A forward that changes its arguments, or what it holds, by its samples is refused, or said."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import TraceError
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import QUIET

SIZE = 6


class Masking(nn.Module):
    """Scales its samples in place, and renames a label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x[:, 0] = 0.5
        x.mul_(2)
        y[y == 1] = 0
        return F.cross_entropy(self.last(torch.tanh(self.second(torch.tanh(self.first(x)))) + x), y)


def test_changed_arguments_are_refused() -> None:
    """The caller's tensors stayed as they were."""
    batch = labelled(SIZE, 0)[1]
    with pytest.raises(TraceError, match=r"changes its arguments x, y in place.*x\.clone\(\)"):
        AutoVaruna(Masking(), num_micro_batches=2, **QUIET)(**batch)


class Statistics(nn.Module):
    """Averages its features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return hidden.square().mean()


def test_statistics_of_samples_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autovaruna"):
        AutoVaruna(Statistics(), num_micro_batches=2, **QUIET)(labelled(SIZE, 0)[1]["x"])
    assert "forward changes mean by the numbers of its samples" in caplog.text


class Policy(nn.Module):
    """Returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Categorical(logits=self.first(x))


def test_a_model_that_returns_no_tensors_is_told_so() -> None:
    with pytest.raises(TraceError, match="returns nothing but Categorical, which hides its tensors"):
        AutoVaruna(Policy(), num_micro_batches=2, **QUIET)(labelled(SIZE, 0)[1]["x"])
