"""A forward may change its arguments: stages do not share what they change, and run it again from what they got."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import TraceError
from tests.catalogue import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, train

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


@pytest.mark.parametrize("recompute", [False, True])
def test_changed_arguments_train_as_in_plain_pytorch(recompute: bool) -> None:
    case = Case("masking", Masking, labelled)
    ours, plain = ([case.batch(SIZE, step) for step in range(2)] for _ in range(2))
    compare(train(case, pipeline(2, recompute=recompute), ours), plain_steps(case, plain))


def test_the_callers_tensors_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    batch = labelled(SIZE, 0)[1]
    before = {name: each.clone() for name, each in batch.items()}
    with caplog.at_level(logging.WARNING, "autovaruna"):
        AutoVaruna(Masking(), num_micro_batches=2, **QUIET)(**batch)
    assert "changes its arguments x, y in place" in caplog.text
    assert all(torch.equal(batch[name], each) for name, each in before.items())


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
