"""Holds what a model says of its last step, and that a loss like NaN is told once."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World


class Net(nn.Module):
    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        self.first, self.last, self.has_loss = nn.Linear(4, 4), nn.Linear(4, 2), has_loss

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.first(x))
        return out.square().mean() if self.has_loss else out


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_loss_that_is_not_finite_is_told_once(has_loss: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A sample of rank 1 is not a number in step 2 and on; a loss of the script's own is each rank's."""
    torch.manual_seed(0)
    net = Net(has_loss)

    def run(world: World) -> list[Any]:
        own = copy.deepcopy(net)
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        settings = {"stage_ranks": [[0], [1]], "num_micro_batches": 4, "save_deployment": False, "progress": False}
        model = AutoVaruna(own, optimizer, load_deployment=False, **settings)
        said = [(model.metrics.step, model.metrics.loss, model.metrics.is_finite)]
        for step in range(4):
            x = torch.ones(4, 4)
            if step and world.rank == 1:
                x[3, 1] = float("nan")
            out = model(x)
            loss = out if has_loss else out.square().mean()
            loss.backward()
            metrics = model.metrics
            assert metrics.step == step + 1
            assert metrics.loss == pytest.approx(loss.item(), nan_ok=True) if has_loss else metrics.loss is None
            said.append(metrics.is_finite)
        return said

    with caplog.at_level(logging.WARNING, "autovaruna.runtime.metrics"):
        first, second = run_ranks(2, run)
    assert first[0] == second[0] == (0, None, None)
    assert second[1:] == [True, False, False, False]
    assert first[1:] == (second[1:] if has_loss else [True] * 4)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "autovaruna.runtime.metrics")
    assert line.startswith("step 2: ") and "stage 1" in line and "rank 1" in line
    assert ("micro-batch 3 (samples 2 to 3 of rank 1) is nan" in line) == has_loss
