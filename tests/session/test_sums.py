"""A loss that is a sum over the samples must be added up: averaged, it would be smaller by the micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, train

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Returns a loss of its own."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layers(x), y)


class Whole(Model):
    """Returns a loss that knows the model."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)  # type: ignore[call-arg, arg-type]

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y, reduction="sum") / 10

    def penalty(self) -> Tensor:
        weight, bias, *_ = self.parameters()
        return weight.square().mean() + bias.sum()


def by_name(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y, reduction="sum") / 100


def by_hand(scores: Tensor, y: Tensor) -> Tensor:
    return -0.01 * scores.log_softmax(1).gather(1, y[:, None]).sum()


def of_several(scores: Tensor, y: Tensor) -> Tensor:
    return torch.stack([by_name(scores, y), scores.square().sum(1).sum() / 100]).sum()


def of_sequences(scores: Tensor, y: Tensor) -> Tensor:
    """Calls what torch.export cannot trace."""
    steps, length = torch.stack([scores] * 3).log_softmax(2), torch.full((y.shape[0],), 3)
    return F.ctc_loss(steps, y.clamp(min=1)[:, None], length, torch.ones_like(length), reduction="sum") / 10


def times_samples(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y) * y.shape[0] / 100


def times_length(scores: Tensor, y: Tensor) -> Tensor:
    return 0.1 * y.shape[0] * scores.square().mean()


def by_product(scores: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bc,bc->", scores, scores) / 100


@pytest.mark.parametrize(
    "loss",
    (by_name, by_hand, of_several, of_sequences, times_samples, times_length, by_product),
    ids=lambda loss: loss.__name__,
)
def test_a_sum_is_added_up_or_refused(loss: Loss) -> None:
    """With the setting that the error names, the numbers are those of the whole batch; with one micro-batch always."""
    case = Case(f"sum_{loss.__name__}", lambda: Model(loss), labelled)
    batches = [case.batch(6, step) for step in range(2)]
    with pytest.raises(InputError, match=r"is a sum over the samples.*reduction='sum'"):
        AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**batches[0][1])
    compare(train(case, pipeline(2, settings={"reduction": "sum"}), batches), plain_steps(case, batches))
    compare(train(case, pipeline(2, num_micro_batches=1), batches), plain_steps(case, batches))


def divided(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y, reduction="sum") / y.shape[0]


def masked(scores: Tensor, y: Tensor) -> Tensor:
    kept = (y > 0).float()
    return (F.cross_entropy(scores, y, reduction="none") * kept).sum() / kept.sum().clamp(min=1.0)


def by_number(scores: Tensor, y: Tensor) -> Tensor:
    """Divides by the samples in several ways, and multiplies again."""
    total = (scores @ scores.new_ones(CLASSES)).sum() / torch.scalar_tensor(y.shape[0])
    return total + scores.mean() * y.shape[0] / scores.shape[0]


def of_features(scores: Tensor, y: Tensor) -> Tensor:
    return scores.square().sum(1).mean() + F.cross_entropy(scores, y)


@pytest.mark.parametrize("loss", (divided, masked, by_number, of_features), ids=lambda loss: loss.__name__)
def test_a_mean_is_no_sum(loss: Loss) -> None:
    batch = labelled(6, 0)
    AutoVaruna(Model(loss), num_micro_batches=2, **QUIET)(**batch[1]).backward()


SUMS: dict[str, Callable[[Whole, Tensor, Tensor], Tensor]] = {
    "a divided layer": lambda model, x, y: model.added(x / x.shape[0], y),
    "a counted layer": lambda model, x, y: model.added(x * (y > 0).sum(), y),
    "a penalty a sample": lambda model, x, y: model.added(x, y) + x.shape[0] * model.penalty(),
    "a quotient": lambda model, x, y: model.added(x, y) / x.shape[0],
    "divided losses": lambda model, x, y: (model.layers(x).square() / x.shape[0]).sum(),
    "scaled losses": lambda model, x, y: (model.layers(x).square() * x.shape[0]).mean(),
    "a product": lambda model, x, y: model.added(x, y) * x.shape[0] / 10,
    "a count": lambda model, x, y: model.added(x, y) / (y > 0).sum(),
    "labels left out": lambda model, x, y: F.cross_entropy(model.layers(x), y, ignore_index=0),
}
NO_SUMS: dict[str, Callable[[Whole, Tensor, Tensor], Tensor]] = {
    "a penalty": lambda model, x, y: model.added(x, y) + model.penalty(),
    "a weight": lambda model, x, y: model.added(x, y) + next(model.parameters()).sum(),
    "a mean": lambda model, x, y: model.layers(x).square().mean(),
    "a mean among sums": lambda model, x, y: model.added(x, y) + model.layers(x).square().mean(),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_is_added_up_is_the_loss_of_the_whole_batch(name: str) -> None:
    """Micro-batches get its size, and what is counted in it, wherever that is what plain PyTorch computes with."""
    case = Case(f"added_{name}", lambda: Whole(SUMS[name]), labelled)  # type: ignore[arg-type]
    batches = [case.batch(size, step) for step, size in enumerate((7, 6))]
    compare(train(case, pipeline(2, settings={"reduction": "sum"}), batches), plain_steps(case, batches))


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_is_not_added_up(name: str) -> None:
    model = Whole(NO_SUMS[name])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"is no sum over the samples.*the setting reduction='mean'"):
        AutoVaruna(model, num_micro_batches=2, reduction="sum", **QUIET)(**labelled(6, 0)[1])
    AutoVaruna(model, num_micro_batches=1, reduction="sum", **QUIET)(**labelled(6, 0)[1])
