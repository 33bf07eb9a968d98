"""Counts over samples, and places in the batch, that a number parts: a micro-batch may never come to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, Written, labelled, two_layers
from tests.products import some
from tests.session.training import pipeline, refuse, train_as_plain

Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of the model, its scores, what is hard (a mask of samples), and their losses."""
SIZE, MOST = 12, 9


def hard(loss: Loss) -> Any:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        scores = self.last(torch.tanh(self.first(x)))
        return loss(self, scores, scores.argmax(1) != y, F.cross_entropy(scores, y, reduction="none"))

    return two_layers(forward, most=torch.tensor(float(MOST)))


def case_of(name: str, loss: Loss) -> Case:
    return Case(f"thresholds, {name}", lambda: hard(loss), labelled)


def places(losses: Tensor) -> Tensor:
    return torch.arange(losses.shape[0])


COUNTS: dict[str, Loss] = {
    "capacity": lambda m, s, hard, e: (e * (hard.cumsum(0) - 1 < MOST)).mean(),
    "in each class": lambda m, s, hard, e: (
        e * ((c := F.one_hot(s.argmax(1), 2 * WIDTH)).cumsum(0) * c < MOST).all(1)
    ).mean(),
    "whole": lambda m, s, hard, e: torch.where(hard.sum() > MOST, 2 * e, e).mean(),
    "share": lambda m, s, hard, e: torch.where(hard.float().sum() / MOST > 1.0, 2 * e, e).mean(),
    "above": lambda m, s, hard, e: (e * (1 + F.relu(hard.sum() - float(MOST)))).mean(),
    "steps": lambda m, s, hard, e: (e * (1 + hard.sum() // MOST)).mean(),
    "none at all": lambda m, s, hard, e: (e * (1 + hard.sum().clamp(max=1))).mean(),
    "ranks": lambda m, s, hard, e: (e * (hard.long().argsort().argsort() < MOST)).mean(),
    "first": lambda m, s, hard, e: e[hard][:MOST].sum() / e.shape[0],
    "buffer": lambda m, s, hard, e: (e * (hard.cumsum(0) < m.most)).mean(),
    "constant": lambda m, s, hard, e: (e * (hard.cumsum(0) < torch.tensor(MOST))).mean(),
}
PLACES: dict[str, Loss] = {
    "places": lambda m, s, hard, e: (e * (places(e) < MOST)).mean(),
    "weights": lambda m, s, hard, e: (e * (1 + places(e) // MOST)).mean(),
    "rows": lambda m, s, hard, e: (s * m.first.weight[places(e) // MOST, :CLASSES]).mean() + e.mean(),
    "size": lambda m, s, hard, e: (e * (torch.full((), e.shape[0]) < MOST)).mean() + e.mean(),
}
AS_PLAIN: dict[str, Loss] = {
    "never": lambda m, s, hard, e: (e * (hard.cumsum(0) < 1000)).mean(),
    "of each sample": lambda m, s, hard, e: (e * ((s > 0).sum(1) > 1)).mean() + (s * ((s > 0).cumsum(1) < 2)).mean(),
    "indices": lambda m, s, hard, e: e.mean() - s[places(e), hard.long()].mean(),
    "flat": lambda m, s, hard, e: e.mean() - s.reshape(-1)[places(e) * CLASSES + hard.long()].mean(),
    "turns": lambda m, s, hard, e: (s * (torch.arange(CLASSES).repeat(e.shape[0]) // 2).view_as(s)).mean() + e.mean(),
    "output": lambda m, s, hard, e: {"loss": e.mean(), "many": hard.sum() > MOST},
}


@pytest.mark.parametrize("name", some([*COUNTS], 5))
def test_a_count_above_a_number_is_refused_before_it_is_reached(name: str) -> None:
    words = r"(whether a count .* is above|of several samples, meets each sample in) .*at .*thresholds.py:\d+"
    refuse(case_of(name, COUNTS[name]), words, labelled(SIZE, 0)[1])


@pytest.mark.parametrize("name", some([*PLACES], 2))
def test_places_in_the_batch_are_refused(name: str) -> None:
    words = (
        r"mixes the samples of a batch: \w+ is made of the places of samples in the batch.* at .*test_thresholds.py:\d+"
    )
    refuse(case_of(name, PLACES[name]), words, labelled(SIZE, 0)[1])


@pytest.mark.parametrize("name", some([*AS_PLAIN], 4))
def test_others_train_as_plain_pytorch(name: str) -> None:
    train_as_plain(case_of(name, AS_PLAIN[name]), pipeline(2), SIZE, SIZE)


def test_a_table_as_long_as_the_batch_is_refused() -> None:
    """Once, it was cut as its samples are, and ended in an IndexError."""

    def forward(self: Any, x: Tensor, y: Tensor, table: Tensor) -> Tensor:
        return F.cross_entropy(self.last(x + F.embedding(y, table)), y)

    given = labelled(SIZE, 0)[1] | {"table": torch.randn(SIZE, WIDTH)}
    refuse(Written(forward, last=torch.nn.Linear(WIDTH, CLASSES)), r"embedding.* at .*test_thresholds.py:\d+", given)
