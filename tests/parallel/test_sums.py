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
from tests.parallel.training import QUIET, pipeline, train
from tests.reference import compare, plain_steps

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Returns a loss of its own."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layers(x), y)


def by_name(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y, reduction="sum") / 100


def by_hand(scores: Tensor, y: Tensor) -> Tensor:
    return -0.01 * scores.log_softmax(1).gather(1, y[:, None]).sum()


def of_several(scores: Tensor, y: Tensor) -> Tensor:
    return torch.stack([by_name(scores, y), scores.square().sum(1).sum() / 100]).sum()


def of_sequences(scores: Tensor, y: Tensor) -> Tensor:
    """Calls what torch.export cannot trace."""
    steps, length = torch.stack([scores] * 3).log_softmax(2), torch.full((len(y),), 3)
    return F.ctc_loss(steps, y.clamp(min=1)[:, None], length, torch.ones_like(length), reduction="sum") / 10


def times_samples(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y) * len(y) / 100


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
    return F.cross_entropy(scores, y, reduction="sum") / len(y)


def masked(scores: Tensor, y: Tensor) -> Tensor:
    kept = (y > 0).float()
    return (F.cross_entropy(scores, y, reduction="none") * kept).sum() / kept.sum().clamp(min=1.0)


def by_number(scores: Tensor, y: Tensor) -> Tensor:
    """Divides by the samples in several ways, and multiplies again."""
    total = (scores @ scores.new_ones(CLASSES)).sum() / torch.scalar_tensor(len(y))
    return total + scores.mean() * len(y) / scores.shape[0]


def of_features(scores: Tensor, y: Tensor) -> Tensor:
    return scores.square().sum(1).mean() + F.cross_entropy(scores, y)


@pytest.mark.parametrize("loss", (divided, masked, by_number, of_features), ids=lambda loss: loss.__name__)
def test_a_mean_is_no_sum(loss: Loss) -> None:
    batch = labelled(6, 0)
    AutoVaruna(Model(loss), num_micro_batches=2, **QUIET)(**batch[1]).backward()
