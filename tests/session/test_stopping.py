"""Holds that ranks agree on the end of a run, and where a checkpoint of it is saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, ConfigError
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from autovaruna.session.stopping import STATUS

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def wrap(**settings: Any) -> tuple[AutoVaruna, torch.optim.Optimizer]:
    net = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    settings = {"save_deployment": False, "load_deployment": False, "progress": False, **settings}
    return AutoVaruna(net, optimizer, **settings), optimizer


def test_all_ranks_stop_after_the_call_that_tells_them() -> None:
    """Rank 1 wants to stop in step 2; all know after the call of step 3, and for good."""

    def run(world: World) -> list[bool]:
        model, optimizer = wrap()
        answers = []
        for step in range(5):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            answers.append(model.should_stop(world.rank == 1 and step == 2))
        return answers

    assert run_ranks(2, run) == [[False, False, False, True, True]] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_is_saved_once_the_optimizer_has_stepped(num_ranks: int, tmp_path: Path) -> None:
    """Gradients of two calls are accumulated for a step; what one of them has left behind is in no checkpoint."""

    def run(world: World) -> bool:
        model, optimizer = wrap(save_on_signal=str(tmp_path))
        for call in range(6):
            model.should_stop(call == 5 and world.rank == 0)
            model(torch.ones(2, 4)).mean().backward()
            if call % 2:
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(SystemExit, match=str(STATUS)):
            model(torch.ones(2, 4))
        return model.should_stop()

    assert run_ranks(num_ranks, run) == [True] * num_ranks
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


def test_the_scripts_numbers_go_on(tmp_path: Path) -> None:
    """A run that has saved its step 10 saves step 11 a step later; one that has loaded it saves 12 two steps later."""

    def run(world: World, is_first: bool) -> None:
        model, optimizer = wrap(save_on_signal=str(tmp_path))
        if not is_first:
            model.load_checkpoint(str(tmp_path), step=10)
        for number in range(4):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            if number == 0 and is_first:
                model.save_checkpoint(str(tmp_path), step=10)
            model.should_stop(number == 1)

    for is_first in (True, False):
        with pytest.raises(SystemExit):
            run_ranks(2, lambda world, first=is_first: run(world, first))
    assert {path.name[:13] for path in tmp_path.glob("step-*")} == {f"step-000000{step}" for step in (10, 11, 12)}


def test_several_models_are_refused(tmp_path: Path) -> None:
    def run(world: World) -> None:
        for model, _ in (wrap(save_on_signal=str(tmp_path)), wrap(save_on_signal=str(tmp_path))):
            model(torch.ones(2, 4))

    with pytest.raises(ConfigError, match=r"expected one model.*should_stop\(\)"):
        run_ranks(2, run)
