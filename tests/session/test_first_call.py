"""Holds that a script may evaluate before it trains: the plan is one for training all the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError
from autovaruna.runtime.transport.threads import run_ranks

QUIET = {"load_deployment": False, "save_deployment": False, "profile_iterations": 1, "progress": False}


class Net(nn.Module):
    """Returns scores, or a loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        scores: Tensor = self.last(self.norm(torch.relu(self.first(x))))
        return scores if y is None else F.cross_entropy(scores, y)


def test_evaluating_first_changes_nothing():
    net, x, y = Net(), torch.randn(8, 8), torch.arange(8) % 4

    def train(evaluates_first: bool) -> list[float]:
        own = copy.deepcopy(net)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        model = AutoVaruna(own, optimizer, num_stages=2, num_micro_batches=2, inputs="replicated", seed=0, **QUIET)
        if evaluates_first:
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(x), copy.deepcopy(net).eval()(x))
            assert not own.norm.training
            model.train()
        losses = []
        for _ in range(3):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first, other = (run_ranks(2, lambda world, way=way: train(way)) for way in (False, True))
    assert first[0][-1] < first[0][0]
    assert first == other


def test_a_plan_for_evaluation_alone_refuses_to_train():
    model = AutoVaruna(Net(), num_micro_batches=2, **QUIET)
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    with torch.no_grad():
        model(x)
    with pytest.raises(InputError, match="planned for evaluation"):
        model(x, y)
