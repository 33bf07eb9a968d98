"""A model that computes with the size of its batch gets that of the whole batch, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import AutoVarunaError
from tests.catalogue import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, train

SIZE = 7
Loss = Callable[["Sized", Tensor, Tensor], Tensor]


class Sized(nn.Module):
    """Ends in a loss that knows how many samples there are."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)

    def losses(self, hidden: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(torch.tanh(hidden)), y, reduction="none")

    def penalty(self) -> Tensor:
        return self.first.weight.square().sum()


LOSSES: dict[str, Loss] = {
    "a divided layer": lambda model, x, y: model.losses(model.first(x) / x.shape[0], y).mean(),
    "a root": lambda model, x, y: model.losses(model.first(x) / x.size(0) ** 0.5, y).sum() / x.size(0),
    "a power": lambda model, x, y: model.losses(model.first(x).sigmoid() ** x.size(0), y).mean(),
    "a tensor": lambda model, x, y: model.losses(model.first(x) * torch.full((), x.size(0)) / 9, y).mean(),
    "a divided weight": lambda model, x, y: model.losses(F.linear(x, model.first.weight / x.shape[0]), y).mean(),
    "a divided penalty": lambda model, x, y: model.losses(model.first(x), y).mean() + model.penalty() / x.shape[0],
    "a scaled penalty": lambda model, x, y: (
        model.losses(model.first(x), y).sum() / x.shape[0] + model.penalty() * x.shape[0]
    ),
    "divided losses": lambda model, x, y: (model.losses(model.first(x), y) / x.shape[0]).sum(),
    "shares": lambda model, x, y: (
        model.losses(model.first(x), y) * (x[:, 0].exp() / x[:, 0].exp().sum()) / 2 + model.last(x)[:, 0] / y.sum()
    ).sum(),
    "a mean of shares": lambda model, x, y: (
        model.losses(model.first(x), y) * (x[:, 0].exp() / x[:, 0].exp().sum())
    ).mean(),
    "places": lambda model, x, y: F.log_softmax(model.last(model.first(x)), 1)[torch.arange(x.shape[0]), y].mean(),
}
if torch.__version__ < "2.12":  # its torch.export fixes a batch size that is an exponent, which is refused
    del LOSSES["a power"]


@pytest.mark.parametrize("name", LOSSES)
def test_the_size_is_that_of_the_whole_batch(name: str) -> None:
    case = Case(name.replace(" ", "_"), lambda: Sized(LOSSES[name]), labelled)
    batches = [case.batch(size, step) for step, size in enumerate((SIZE, SIZE - 1))]
    compare(train(case, pipeline(2), batches), plain_steps(case, batches))


def clamped(model: Sized, x: Tensor, y: Tensor) -> Tensor:
    return model.losses(model.first(x).clamp(max=x.shape[0] / 2), y).mean()


def doubly_averaged(model: Sized, x: Tensor, y: Tensor) -> Tensor:
    return (model.losses(model.first(x), y) / x.shape[0]).mean()


def with_a_penalty(model: Sized, x: Tensor, y: Tensor) -> Tensor:
    return (model.losses(model.first(x), y).sum() + model.penalty()) / x.shape[0]


def numbered(model: Sized, x: Tensor, y: Tensor) -> Tensor:
    return model.losses(model.first(x) * torch.arange(x.shape[0])[:, None], y).mean()


def cumulated(model: Sized, x: Tensor, y: Tensor) -> Tensor:
    return model.losses(model.first(x) + torch.ones(x.shape[0], 1).cumsum(0), y).mean()


def looked_up(model: Sized, x: Tensor, y: Tensor) -> Tensor:
    table = model.first.weight.repeat(9, 1)
    return model.losses(model.first(x) + table[torch.arange(x.shape[0])], y).mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (clamped, "size of the batch is a number that clamp computes with"),
        (doubly_averaged, "no mean over its samples: mean"),
        (with_a_penalty, "no mean over its samples: square"),
        (numbered, "counts the samples, is computed with in mul"),
        (cumulated, "counts the samples, is computed with in add"),
        (looked_up, "counts the samples, is computed with in index"),
    ],
)
def test_what_has_no_such_number_is_refused(loss: Loss, words: str) -> None:
    with pytest.raises(AutoVarunaError, match=rf"{words}.* at .*test_batch_size"):
        AutoVaruna(Sized(loss), num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])
