"""Holds that a micro-batch takes no longer, however many there are."""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.runtime.transport.base import Part
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import Message, World
from tests.session.training import QUIET


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


def num_calls(num_micro_batches: int) -> int:
    """Returns how many functions, of Python and of C, the third step calls."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"num_micro_batches": num_micro_batches, "max_micro_batches": num_micro_batches}
    model = AutoVaruna(net, optimizer, num_stages=1, profile_iterations=1, **settings, **QUIET)
    x, y = torch.randn(num_micro_batches, 4), torch.randn(num_micro_batches, 1)
    counter = count()

    def step() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(counter)

    step()
    step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return next(counter)


def test_a_step_calls_as_many_functions_for_each_micro_batch() -> None:
    few, many = num_calls(50), num_calls(1000)
    assert many / 1000 <= 1.2 * few / 50


class Stuck(Part):
    """Has no room to leave."""

    needs_calls = True

    def is_done(self) -> bool:
        return False


@pytest.mark.parametrize("num_waiting", [100_000])
def test_a_glance_takes_no_longer_the_more_messages_wait(num_waiting: int) -> None:
    """All were copied into a list at every instruction: the time of a step grew with the square."""

    def run(world: World) -> tuple[float, float]:
        def seconds() -> float:
            tries = []
            for _ in range(20):
                begin = time.thread_time()
                world.glance()
                tries.append(time.thread_time() - begin)
            return min(tries)

        def wait_for(number: int) -> None:
            for _ in range(number):
                Message(world, [Stuck()], ("sent", 0, 0, 0), 1)

        wait_for(10)
        few = seconds()
        wait_for(num_waiting)
        many = seconds()
        world.lagging.clear()
        return few, many

    ((few, many),) = run_ranks(1, run)
    assert many <= 10 * few + 50e-6
