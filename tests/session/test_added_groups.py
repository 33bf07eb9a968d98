"""Groups that an optimizer is given after wrapping train, and are saved, as in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, InputError
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import QUIET

BATCH = labelled(6, 0)[1]["x"]
TWO = QUIET | {"num_stages": 2, "inputs": "replicated", "num_micro_batches": 1, "cuts": ["1"]}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(BATCH).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(net: nn.Module, grows_after: int, world: World | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gives the first layer to the optimizer after some steps; returns the states after three."""
    first, last = [list(layer.parameters()) for layer in net.children()]
    optimizer = torch.optim.Adam(last, lr=0.1)
    model: Any = net if world is None else AutoVaruna(net, optimizer, **TWO)
    for number in range(3):
        if number == grows_after:
            optimizer.add_param_group({"params": first, "lr": 0.3})
        step(model, optimizer)
    state = optimizer.state_dict() if world is None else model.optimizer_state_dict()
    return model.state_dict(), state


@pytest.mark.parametrize("grows_after", [0, 1])
def test_an_added_group_trains_and_is_saved(grows_after: int) -> None:
    """Once, one more group before the first call was a bare ``ValueError``, and one after it was left out of states."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    nets = [copy.deepcopy(net), copy.deepcopy(net)]
    weights, moments = run_ranks(2, lambda world: train(nets[world.rank], grows_after, world))[0]
    expected, plain = train(net, grows_after, None)
    torch.testing.assert_close(weights, expected)
    assert [group["lr"] for group in moments["param_groups"]] == [0.1, 0.3]
    torch.testing.assert_close(moments["state"], plain["state"])


def test_an_added_group_of_another_model_is_refused() -> None:
    net = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AutoVaruna(net, optimizer, **QUIET, num_micro_batches=2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InputError, match="1 of the optimizer's 3 parameters are not the model's"):
        model(BATCH)
