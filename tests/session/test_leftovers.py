"""Holds that a step leaves no memory behind for Python's garbage collector to find."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.runtime.step_runner import StepRunner
from tests.session.training import QUIET


class Classifier(nn.Module):
    """Returns its scores beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.linear(x)
        return {"loss": nn.functional.cross_entropy(scores, y), "scores": scores}


def step_runners() -> list[StepRunner]:
    """Returns all that are alive in this process."""
    return [each for each in gc.get_objects() if type(each) is StepRunner]


@pytest.mark.parametrize("loss_mode", ["loss", "outputs"])
def test_a_step_leaves_nothing_to_the_garbage_collector(loss_mode: str) -> None:
    """What a step held, the outputs of every micro-batch among it, is gone with the results that the caller drops."""
    model = Classifier()
    wrapped = AutoVaruna(model, num_micro_batches=2, loss_mode=loss_mode, **QUIET)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    for _ in range(2):
        gc.collect()
        before = {id(each) for each in step_runners()}  # threads of an earlier test may still be ending
        gc.disable()
        try:
            wrapped(x, y)["loss"].backward()
            left = [each for each in step_runners() if id(each) not in before]
        finally:
            gc.enable()
    assert not left
