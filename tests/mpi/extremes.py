"""What `test_extremes.py` runs on ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.runtime.environment import get_world
from tests.mpi.numbers import FAST, quietly
from tests.session.training import gradients_of, pipeline, planned


class Tiny(nn.Module):
    """Takes next to no time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.first(x))) ** 2).mean()


def samples(number: int) -> Tensor:
    """Returns the same samples on all ranks."""
    return torch.randn(number, 2, generator=torch.Generator().manual_seed(1))


def many_micro_batches(number: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a step in which each sample is a micro-batch, and the gradients that a rank holds."""
    net = Tiny()
    model = AutoVaruna(
        net, torch.optim.SGD(net.parameters(), lr=0.1), inputs="replicated", num_micro_batches=number, **FAST
    )

    def step() -> Tensor:
        with planned(pipeline(get_world().num_ranks, num_micro_batches=number)):
            loss: Tensor = model(samples(number))
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    loss: Tensor = quietly(step)
    return loss, gradients_of(model)
