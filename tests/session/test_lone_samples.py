"""Micro-batches of one sample get the gradients of the whole batch, however torch lays out a batch of one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.catalogue import Batch, Case
from tests.reference import compare, plain_steps
from tests.session.training import pipeline, train

KINDS = ("batch", "volume", "instance")


class Tokens(nn.Module):
    """Takes the places of an image for tokens behind a normalisation, or before it: gradient and input differ."""

    def __init__(self, kind: str, is_before: bool) -> None:
        super().__init__()
        self.kind, self.is_before = kind, is_before
        self.kernel, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
        self.norm, self.scale = (
            nn.BatchNorm2d(6),
            nn.Parameter(torch.rand(2, 2, 5) if kind == "volume" else torch.rand(4, 5)),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.kernel(x)
        if self.kind == "volume":
            hidden = hidden.unflatten(2, (2, 2))
        if not self.is_before:
            return self.last(F.layer_norm(self.normalized(hidden).flatten(2).transpose(1, 2), (6,))).square().mean()
        tokens = F.layer_norm(hidden.flatten(2).transpose(1, 2), (6,))
        hidden = self.normalized(tokens.transpose(1, 2).unflatten(2, hidden.shape[2:]))
        return F.cross_entropy(self.last((hidden * self.scale).sigmoid().flatten(2).mean(2)), y)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.is_before}"

    def normalized(self, hidden: Tensor) -> Tensor:
        norm = self.norm
        if self.kind == "instance":
            return F.instance_norm(hidden, None, None, norm.weight, norm.bias)
        return F.batch_norm(hidden, norm.running_mean, norm.running_var, norm.weight, norm.bias)


def images(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return (), {"x": torch.randn(size, 3, 6, 7, generator=generator), "y": torch.arange(size) % 5}


@pytest.mark.parametrize("is_before", (False, True), ids=("behind", "before"))
@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_is_as_good_as_many(kind: str, is_before: bool) -> None:
    case = Case(f"tokens_{kind}", partial(Tokens, kind, is_before), images)
    batches = [case.batch(3, step) for step in range(2)]
    compare(train(case, pipeline(2), batches), plain_steps(case, batches))


class Asking(nn.Module):
    """Does something else for a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if x.shape[0] == 1:
            hidden = 5 * hidden
        if y.numel() - 1:
            hidden = hidden - hidden.mean(1, keepdim=True)
        return F.cross_entropy(self.last(hidden), y)


def vectors(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return (), {"x": torch.randn(size, 6, generator=generator), "y": torch.arange(size) % 5}


@pytest.mark.parametrize("sizes", [(3, 1, 3), (1, 3, 1)])
def test_a_branch_for_one_sample_is_taken_where_the_batch_has_one(sizes: tuple[int, ...]) -> None:
    """A micro-batch of one sample of several is not alone."""
    case = Case("asking", Asking, vectors)
    batches = [case.batch(size, step) for step, size in enumerate(sizes)]
    compare(train(case, pipeline(2, num_micro_batches=3), batches), plain_steps(case, batches))
