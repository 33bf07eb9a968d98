"""Draws models in which samples begin to meet at some step: each gives plain PyTorch's numbers up to that, and says so.

Once the analysis sees nothing, so that the steps alone tell; counts it has to see before a step can.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError
from tests.evidence.test_witness import _blind
from tests.products import some
from tests.reference import sgd
from tests.session.training import on_ranks, pipeline

assert _blind  # a fixture
STEPS, SAMPLES, WIDTH = 3, 12, 6
Act = Callable[[Tensor], Tensor]
MEETING: dict[str, Act] = {
    "largest": lambda h: h / h.abs().max(),
    "mean": lambda h: h - h.mean(0),
    "softmax": lambda h: h.softmax(0),
    "sort": lambda h: h.sort(0).values,
    "cumsum": lambda h: h.cumsum(0),
    "order": lambda h: h[h[:, 0].argsort()],
    "neighbour": lambda h: h.roll(1, 0),
}
COUNTING: dict[str, Act] = {
    "rank": lambda h: h * (h[:, 0].argsort().argsort() < h.shape[0] - 2)[:, None],
    "first": lambda h: h * ((h[:, 0] > 0).cumsum(0) < 5)[:, None],
    "places": lambda h: h * (torch.arange(h.shape[0]) < 8)[:, None],
    "most": lambda h: torch.where((h.argmax(1) == 0).sum() > 3, h, 2 * h),
    "outliers": lambda h: h * (h.abs() < 2 * h.std()),
    "best": lambda h: h - h[h[:, 0].argmax()],
}
ALONE: dict[str, Act] = {
    "softmax": lambda h: h.softmax(1),
    "sort": lambda h: h.sort(1).values,
    "cumsum": lambda h: h.cumsum(1),
    "mask": lambda h: h * (h > h.mean(1, keepdim=True)),
    "pick": lambda h: h.gather(1, h.argsort(1)),
    "top": lambda h: torch.zeros_like(h).scatter(1, h.topk(2, 1).indices, 1.0) * h,
    "norm": lambda h: F.layer_norm(h, (WIDTH,)),
    "drop": lambda h: F.dropout(h, 0.0),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda o, y: (o.mean(1) - y).square().mean(),
    "counted": lambda o, y: ((o.mean(1) - y).square() * (y > -9)).sum() / (y > -9).sum(),
    "classes": lambda o, y: F.cross_entropy(o, (y > 0).long()),
    "smooth": lambda o, y: F.smooth_l1_loss(o.amax(1), y),
}


class Drawn(nn.Module):
    """Runs drawn acts one after the other; what lets samples meet has a share that the script may change."""

    def __init__(self, chance: random.Random, meeting: dict[str, Act]) -> None:
        super().__init__()
        self.acts = [chance.choice([*ALONE.values()]) for _ in range(chance.randint(1, 3))]
        self.meeting = chance.choice([*meeting.values()])
        self.place, self.loss = chance.randrange(len(self.acts)), chance.choice([*LOSSES.values()])
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(len(self.acts) + 1))
        self.register_buffer("share", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for place, act in enumerate(self.acts):
            x = x + act(self.layers[place](x))
            if place == self.place:
                x = (1 - self.share) * x + self.share * self.meeting(x)
        return self.loss(self.layers[-1](torch.tanh(x)), y)


def train(model: Any, net: Drawn, optimizer: Any, active: int, losses: list[float]) -> None:
    generator = torch.Generator().manual_seed(active)
    for step in range(STEPS):
        net.share.fill_(0.5 * (step >= active))
        loss = model(*(torch.randn(shape, generator=generator) for shape in ((SAMPLES, WIDTH), (SAMPLES,))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


@pytest.mark.parametrize("seed", some(range(1000), 100))
@pytest.mark.usefixtures("_blind")
def test_it_is_plain_pytorch_up_to_the_step_that_says_so(seed: int) -> None:
    active, expected, losses = trained(seed, MEETING)
    assert all(found == pytest.approx(expected[:active], rel=1e-4) for found in losses)


@pytest.mark.parametrize("seed", some(range(200), 20))
def test_counts_are_refused_before_they_change_anything(seed: int) -> None:
    active, expected, losses = trained(seed, COUNTING)
    for found in losses:
        assert found == pytest.approx(expected[: len(found)], rel=1e-4) and len(found) <= active


def trained(seed: int, meeting: dict[str, Act]) -> tuple[int, list[float], list[list[float]]]:
    """Trains a drawn model; returns the step at which samples meet, plain PyTorch's losses, and those of each rank."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    net, active = Drawn(chance, meeting), chance.randint(0, STEPS)  # at the last one never
    plain, expected = copy.deepcopy(net), list[float]()
    train(plain, plain, sgd(plain.parameters()), active, expected)
    every = {"recheck_trace": 0.99}  # however long a step takes here
    setup = pipeline(1, num_micro_batches=chance.choice((2, 3, 4)), settings=every)
    losses: list[list[float]] = [[] for _ in range(setup.world_size)]

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        train(model, model.module, optimizer, active, losses[rank])  # type: ignore[arg-type]

    is_refused = active < STEPS or meeting is COUNTING
    words = r"(mixes the samples|no mean over|cannot be traced).* at .*test_drawn_mixing.py:\d+"
    with pytest.raises(AutoVarunaError, match=words) if is_refused else nullcontext():
        on_ranks(setup, net, run)
    return active, expected, losses
