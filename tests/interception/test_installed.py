"""What the library installs in the user's process: nothing at import, and nothing that stays once a model is gone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn

import autovaruna
from autovaruna.interception.installed import ProcessPiece
from tests.rank_threads import run_ranks

PLACE = os.path.join(os.path.dirname(autovaruna.__file__), "")
IN_A_PROCESS_OF_ITS_OWN = """
import torch.nn.utils, torch.optim, torch.amp, torch.export, torch.fx, torch.utils.flop_counter
import torch.fx.experimental.symbolic_shapes, torch.utils.data, torch.distributed
from tests.interception.test_installed import shown, train_and_leave
before = shown()
from autovaruna import AutoVaruna
assert shown() == before
train_and_leave()
"""


def shown() -> dict[Any, Any]:
    """Returns what this package has put into torch and sys, the sizes of tables of hooks, and handlers of signals."""
    modules = [each for name, each in sorted(sys.modules.items()) if name.split(".")[0] == "torch" and each]
    classes = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    found: dict[Any, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for owner in [sys, threading, *modules, *(each for each in classes if each.__module__.startswith("torch"))]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, dict) and "hooks" in name and value:
                found[owner.__name__, name] = len(value)
            elif isinstance(value, FunctionType | MethodType) and PLACE in value.__code__.co_filename:
                found[owner.__name__, name] = value
    return found


def test_importing_the_package_and_a_model_that_is_gone_leave_everything_as_it_was() -> None:
    """In a process in which no other test has left a model."""
    command = [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS_OF_ITS_OWN]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.timeout(30)
def test_a_model_may_be_collected_while_another_one_is_wrapped() -> None:
    """The collector runs on the thread that installs, and within it."""
    undone: list[str] = []
    releases: list[Callable[[], None]] = []

    def install() -> Callable[[], None] | None:
        while releases:
            releases.pop()()
        return (lambda: undone.append("undone")) if can_install else None

    can_install = False
    piece = ProcessPiece(install)
    releases.append(piece.acquire())
    can_install = True
    release = piece.acquire()
    assert undone == []
    release()
    assert undone == ["undone"]


def train_and_leave() -> None:
    """Trains a split model, for which optimizers, clipping, scalers, hooks of modules and signals are taken over."""
    from autovaruna import AutoVaruna

    def train(_: object) -> tuple[torch.optim.Optimizer, set[str]]:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        own = set(vars(optimizer))
        model = AutoVaruna(net, optimizer, num_stages=2, save_deployment=False, load_deployment=False)
        model.should_stop()
        model(torch.ones(4, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        other = torch.optim.SGD(net.parameters(), 0.1)
        other.step()
        assert {"step", "zero_grad", "state_dict"} <= set(vars(optimizer)) - own
        assert {("GradScaler", "__init__"), ("torch.nn.utils", "get_total_norm")} <= shown().keys()
        return optimizer, own

    before = shown()
    ends = run_ranks(2, train)
    gc.collect()
    assert shown() == before
    for optimizer, own in ends:
        assert set(vars(optimizer)) == own
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
