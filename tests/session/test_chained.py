"""What a call returns may go into another call: of another model, or of the same one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from tests.session.training import QUIET, gradients_of, pipeline, planned

WIDTH, SIZES = 6, (4, 2)


class Critic(nn.Module):
    """Returns a loss of its own, or scores."""

    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.has_loss = has_loss

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return F.softplus(scores).mean() if self.has_loss else scores


def maker() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def go_backward(first: nn.Module, critic: nn.Module, x: Tensor) -> None:
    """Goes backward through two calls of one model and one of another; part of the loss is of the first alone."""
    made = first(first(x) + 0.1)
    judged = critic(2.0 * made)
    loss = judged if judged.dim() == 0 else F.softplus(judged).mean()
    (loss + made.square().mean()).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("has_loss", [True, False])
def test_gradients_go_through_several_calls(has_loss: bool) -> None:
    """Each rank has samples of its own, more on one: each call counts a rank's own loss, but only once."""
    torch.manual_seed(0)
    models = maker(), Critic(has_loss)
    x = torch.randn(sum(SIZES), WIDTH, dtype=torch.float64)
    for model in models:
        model.double()
    copies = [copy.deepcopy(models) for _ in SIZES]
    go_backward(*models, x)

    def be_rank(world: World) -> list[dict[str, Tensor]]:
        settings: dict[str, Any] = {**QUIET, "num_micro_batches": 2}
        wrapped = [AutoVaruna(model, **settings) for model in copies[world.rank]]
        go_backward(*wrapped, x.split(SIZES)[world.rank])
        return [gradients_of(model) for model in wrapped]

    with planned(pipeline(2, num_micro_batches=2)):
        found = run_ranks(len(SIZES), be_rank, timeout_seconds=60.0)
    for place, model in enumerate(models):
        got = {name: gradient for of_rank in found for name, gradient in of_rank[place].items()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-9, atol=1e-12)
