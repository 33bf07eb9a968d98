"""Rows of samples that meet in one order give the numbers of plain PyTorch; in two, they are refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.errors import AutoVarunaError, TraceError
from tests.catalogue import Batch, Case
from tests.catalogue.case import floats, generator, integers
from tests.catalogue.small import Written
from tests.graph.models import traced_function
from tests.products import some
from tests.session.training import pipeline, refuse, train_as_plain

SERIES, WIDTH = 3, 4
Rows = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def ramp(rows: Tensor) -> Tensor:
    return (torch.tanh(rows) * torch.arange(1, rows.shape[-1] + 1, device=rows.device)).mean()


def numbers(x: Tensor) -> Tensor:
    """Numbers the samples."""
    return torch.arange(x.shape[0], device=x.device)


def by_sample(x: Tensor) -> Tensor:
    return x.reshape(-1, WIDTH)


def in_turns(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(-1, WIDTH)


def written(x: Tensor, mark: Tensor) -> Tensor:
    rows = x.new_zeros(x.shape[0], 2, WIDTH)
    rows[:, 0], rows[:, 1] = mark, x[:, 1]
    return rows


def halves(rows: Tensor) -> Tensor:
    one, other = rows.chunk(2)
    return one * other.sigmoid()


ONE_ORDER: dict[str, Rows] = {
    "repeat": lambda m, x, mark, n: ramp(in_turns(x) + mark.repeat(SERIES, 1)),
    "repeat_interleave": lambda m, x, mark, n: ramp(by_sample(x) + mark.repeat_interleave(SERIES, 0)),
    "expand": lambda m, x, mark, n: ramp(by_sample(x) * mark[:, None].expand(-1, SERIES, -1).reshape(-1, WIDTH)),
    "halves": lambda m, x, mark, n: ramp(halves(torch.cat([x[:, 0], mark]))),
    "three": lambda m, x, mark, n: F.triplet_margin_loss(*torch.cat([*x.unbind(1)]).split(x.shape[0])),
    "unlike parts": lambda m, x, mark, n: ramp(
        (lambda h: h[x.shape[0] :].view(-1, SERIES, WIDTH) * h[: x.shape[0], None])(torch.cat([mark, by_sample(x)]))
    ),
    "places": lambda m, x, mark, n: ramp(by_sample(x) + m.places.repeat(x.shape[0], 1)),
    "places in turns": lambda m, x, mark, n: ramp(in_turns(x) + m.places.repeat_interleave(x.shape[0], 0)),
    "picked": lambda m, x, mark, n: ramp(by_sample(x)[numbers(x) * SERIES + n - 1]),
    "picked in turns": lambda m, x, mark, n: ramp(in_turns(x)[numbers(x) + (n - 1) * x.shape[0]]),
    "written": lambda m, x, mark, n: ramp(written(x, mark)),
}
MIXED: dict[str, Rows] = {
    "repeat": lambda m, x, mark, n: ramp(by_sample(x) + mark.repeat(SERIES, 1)),
    "repeat_interleave": lambda m, x, mark, n: ramp(in_turns(x) + mark.repeat_interleave(SERIES, 0)),
    "expand": lambda m, x, mark, n: ramp(by_sample(x) + mark.expand(SERIES, -1, -1).reshape(-1, WIDTH)),
    "view": lambda m, x, mark, n: ramp(in_turns(x).view(x.shape[0], -1).softmax(-1)),
    "halves": lambda m, x, mark, n: ramp(halves(torch.stack([x[:, 0], mark], 1).flatten(0, 1))),
    "labels": lambda m, x, mark, n: F.cross_entropy(in_turns(x), n.repeat_interleave(SERIES)),
    "mask": lambda m, x, mark, n: in_turns(x)[(x[..., 0] > 0).reshape(-1)].sum() / x.shape[0],
    "places": lambda m, x, mark, n: ramp(in_turns(x) + m.places.repeat(x.shape[0], 1)),
    "places in a loss": lambda m, x, mark, n: F.mse_loss(in_turns(x), m.places.repeat(x.shape[0], 1)),
    "picked": lambda m, x, mark, n: ramp(in_turns(x)[numbers(x) * SERIES + n - 1]),
    "written": lambda m, x, mark, n: (lambda h: h - h.mean(0))(written(x, mark)).square().mean(),
}


def batch(size: int, seed: int) -> Batch:
    g = generator(seed)
    x, mark = floats(size, SERIES, WIDTH, of=g), floats(size, WIDTH, of=g)
    return (), {"x": x, "mark": mark, "n": 1 + integers(SERIES, size, of=g)}


def case_of(name: str, rows: Rows) -> Case:
    def forward(self: Any, x: Tensor, mark: Tensor, n: Tensor) -> Tensor:
        return rows(self, self.layer(x), self.layer(mark), n)

    def build() -> nn.Module:
        return Written(forward, layer=nn.Linear(WIDTH, WIDTH), places=nn.Parameter(torch.randn(SERIES, WIDTH)))

    return Case(f"rows, {name}", build, batch)


@pytest.mark.parametrize("name", some([*ONE_ORDER], 7))
def test_rows_in_one_order_are_trained_as_plain(name: str) -> None:
    train_as_plain(case_of(name, ONE_ORDER[name]), pipeline(1), 7)


@pytest.mark.parametrize("name", some([*MIXED], 7))
def test_rows_of_other_samples_are_refused(name: str) -> None:
    words = "(mixes the samples of a batch|no mean over its samples): .*test_row_orders.py"
    refuse(case_of(f"mixed {name}", MIXED[name]), words, batch(6, 0)[1], AutoVarunaError)


def last_token(self: Any, tokens: Tensor) -> Tensor:
    """Classifies texts by their last token, as many models of transformers do."""
    last = ((tokens != 0) * torch.arange(tokens.shape[1], device=tokens.device)).argmax(-1)
    return self.layer(self.words(tokens))[numbers(tokens), last]


@torch.no_grad()
def test_texts_are_evaluated_by_sample() -> None:
    """Once, numbers made of weights and tokens counted as no samples' where nothing had gradients."""
    tokens, parts = integers(9, 6, 5, of=generator(0)), {"words": nn.Embedding(9, WIDTH), "layer": nn.Linear(WIDTH, 2)}
    assert traced_function(last_token, tokens, **parts).is_dynamic
    with pytest.raises(TraceError, match="made of several samples, meets each sample"):
        traced_function(lambda self, tokens: self.layer((h := self.words(tokens)) - h.mean(0)), tokens, **parts)


def test_one_micro_batch_may_have_any_order() -> None:
    train_as_plain(case_of("repeat alone", MIXED["repeat"]), pipeline(1, num_micro_batches=1), 7)
