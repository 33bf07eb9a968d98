"""A loss that is no mean over its samples is refused with several micro-batches, whose losses are averaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, train

Loss = Callable[[nn.Module, Tensor, Tensor], Any]


class Model(nn.Module):
    """Returns a loss of its own."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)), loss
        self.weight = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self, self.layers(x), y)


def case_of(loss: Loss) -> Case:
    return Case(f"mean_{loss.__name__}", lambda: Model(loss), labelled)


def root(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    return s.square().mean().sqrt()


def norm(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    return (s - 1.0).norm() / 10.0


def overlap(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Divides one sum by another, as the Dice loss does."""
    p, t = s.softmax(1), F.one_hot(y, CLASSES).float()
    return 1.0 - 2.0 * (p * t).sum() / (p.square().sum() + t.sum())


def balance(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Multiplies two means, as losses of routers do."""
    p = s.softmax(1)
    return F.cross_entropy(s, y) + 0.1 * (p.mean(0) * p.mean(0)).sum()


def spread(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(s, y) - s.std(0).mean()


def moments(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Compares a mean with another number."""
    return F.cross_entropy(s, y) + F.mse_loss(s.mean(0), self.layers[2].bias)


def confident(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Averages over as many samples as the scores pick."""
    return F.cross_entropy(s, y, reduction="none")[s.amax(1) > 0].mean()


def first(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Adds a loss of one sample."""
    return F.cross_entropy(s, y) + s[0].square().sum()


def between(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Weighs two means by a third."""
    return torch.lerp(F.cross_entropy(s, y), s.square().mean(), s.mean().sigmoid())


def product(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    return torch.addcmul(F.cross_entropy(s, y), s.square().mean(), s.abs().mean(), value=0.5)


def quotient(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    return torch.addcdiv(F.cross_entropy(s, y), self.weight, s.abs().mean())


def switched(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Goes on from a mean only if it is large."""
    loss = F.cross_entropy(s, y)
    return torch.where(loss > 1.7, loss, 0.5 * loss)


def share(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Divides by how many samples the model gets right."""
    return F.cross_entropy(s, y, reduction="sum") / ((s.argmax(1) == y).sum() + 1)


def unbiased(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(s, y, reduction="sum") / (y.shape[0] - 1)


def own_labels(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Ignores the labels of samples of which the model is sure."""
    return F.cross_entropy(s, torch.where(s.detach().amax(1) > 0, y, -100))


def greatest(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Takes the greatest of all samples, which an operation returns beside its place."""
    return F.cross_entropy(s, y) + s.max(0)[0].mean()


def hardest(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Averages the five largest numbers, of whichever samples."""
    return s.flatten().topk(5)[0].mean()


def directions(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Compares two columns over all samples."""
    return F.cosine_similarity(s[:, 0], s[:, 1], dim=0)


def numbers(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Averages what is a number: of the samples of the second label nothing is."""
    return s.masked_fill((y == 1)[:, None], float("nan")).nanmean()


NO_MEANS = (
    *(root, norm, overlap, balance, spread, moments, confident, first, greatest, hardest, directions, numbers),
    *(between, product, quotient, switched, share, unbiased, own_labels),
)


@pytest.mark.parametrize("loss", NO_MEANS, ids=lambda loss: loss.__name__)
def test_a_loss_that_is_no_mean_is_refused(loss: Loss) -> None:
    """The error names the line; with one micro-batch the numbers are those of plain PyTorch."""
    case = case_of(loss)
    batches = [case.batch(6, step) for step in range(2)]
    with pytest.raises(InputError, match=r"no mean over its samples: .*test_means.py:\d+.*num_micro_batches=1"):
        AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**batches[0][1])
    compare(train(case, pipeline(2, num_micro_batches=1), batches), plain_steps(case, batches))


def routed(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Multiplies, for each expert, the share of tokens that it gets by its mean probability, as Switch does."""
    p = s.softmax(1)
    density = F.one_hot(p.argmax(1), CLASSES).float().mean(0)
    return F.cross_entropy(s, y) + 0.1 * CLASSES * (density * p.mean(0)).sum()


def routed_to_two(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Divides sums over the tokens by their number, as Mixtral does with a mask."""
    p = s.softmax(1)
    mask = torch.ones_like(p[:, :1])
    chosen = F.one_hot(p.topk(2)[1], CLASSES).float() * mask[..., None]
    tokens = chosen.sum(0) / mask.sum()
    return F.cross_entropy(s, y) + 0.1 * (tokens * ((p * mask).sum(0) / mask.sum())[None]).sum()


def by_counts(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Divides the product of two sums by the square of how many tokens there are."""
    p, n = s.softmax(1), s.shape[0]
    chosen = F.one_hot(p.argmax(1), CLASSES).sum(0)
    return F.cross_entropy(s, y) + 0.1 * CLASSES * (chosen * p.sum(0)).sum() / n**2


class InParts(Model):
    """Averages, by their samples, the losses of three micro-batches."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.tensor_split(3), y.tensor_split(3), strict=True)
        return sum((super(InParts, self).forward(*part) * len(part[0]) / len(x) for part in parts), torch.zeros(()))


@pytest.mark.parametrize("loss", (balance, routed, routed_to_two, by_counts), ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("num_samples", (6, 7))
def test_a_load_balance_is_taken_of_micro_batches_where_that_is_asked_for(loss: Loss, num_samples: int) -> None:
    """Its average is that over the micro-batches; with one of them the numbers are those of plain PyTorch."""
    case, reference = case_of(loss), Case("in_parts", lambda: InParts(loss), labelled)
    batches = [case.batch(num_samples, step) for step in range(2)]
    with pytest.raises(InputError, match=r"test_means.py:\d+.*batch_statistics='micro-batch'"):
        AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**batches[0][1])
    settings = {"batch_statistics": "micro-batch"}
    compare(train(case, pipeline(2, settings=settings), batches), plain_steps(reference, batches))
    compare(train(case, pipeline(2, num_micro_batches=1, settings=settings), batches), plain_steps(case, batches))


def scaled(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Scales by parameters and constants, adds, picks, and turns into other types."""
    first, second = F.cross_entropy(s, y), torch.einsum("bc,bc->", s, s) / s.shape[0]
    both = torch.stack([first, second.double().float()])
    return (both * torch.exp(-self.weight)).sum() + self.weight.square() - 0.1 * both[0]


def by_sample(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Takes roots and products of each sample's own numbers, before the mean."""
    p = s.softmax(1).gather(1, y[:, None]).squeeze(1)
    return (s.norm(dim=1) * (1.0 - p).pow(2) + s.square().mean(1).sqrt()).mean()


def unlisted(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Adds samples up, and averages them, with operations that have other names."""
    products = torch.tensordot(s, s, dims=([0, 1], [0, 1])) + torch.linalg.vecdot(s, s, dim=0).sum()
    return products / s.shape[0] + torch.var_mean(s, 0)[1].sum()


def guarded(self: nn.Module, s: Tensor, y: Tensor) -> Tensor:
    """Leaves out what is not finite, weighs by what is the same for all, and labels by what the model says."""
    first, second = F.cross_entropy(s, s.detach().argmax(1)), s.square().mean()
    loss = torch.lerp(torch.addcmul(first, second, self.weight), second, 0.3)
    return torch.where(loss.isfinite().all(), loss, torch.zeros_like(loss))


@pytest.mark.parametrize("loss", (scaled, by_sample, unlisted, guarded), ids=lambda loss: loss.__name__)
def test_a_mean_is_not(loss: Loss) -> None:
    case = case_of(loss)
    batches = [case.batch(7, step) for step in range(2)]
    compare(train(case, pipeline(2), batches), plain_steps(case, batches))


def test_another_output_that_is_no_mean_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is not trained on: the model goes on."""

    def perplexity(self: nn.Module, s: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(s, y)
        return {"loss": loss, "perplexity": loss.detach().exp()}

    with caplog.at_level(logging.WARNING):
        model = AutoVaruna(Model(perplexity), num_micro_batches=2, **QUIET)
        model(**labelled(6, 0)[1])["loss"].backward()
        model(**labelled(6, 1)[1])["loss"].backward()
    assert sum("['perplexity'] is no mean over the samples" in each for each in caplog.messages) == 1
