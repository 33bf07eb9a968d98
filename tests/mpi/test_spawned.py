"""Ranks that a script starts by multiprocessing and joins by a process group, and workers that ranks start."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.mpi.launch import run_group
from tests.mpi.spawned import Numbers, network
from tests.mpi.test_torchrun import ENV


def spawned(method: str, folder: Path, story: str = "") -> CompletedProcess[str]:
    """Runs the story on two ranks. Output goes to a file: a worker that outlived its rank would hold a pipe."""
    command = [sys.executable, "-m", "tests.mpi.spawned", method, str(folder), story]
    done = run_group(
        ["sh", "-c", f'"$@" >{shlex.quote(str(folder / "out"))} 2>&1 </dev/null', "sh", *command], 400, ENV
    )
    return CompletedProcess(command, done.returncode, (folder / "out").read_text())


@pytest.mark.parametrize(
    ("method", "story"), [("spawn", ""), ("fork", ""), ("fork", "called before"), ("forkserver", "")]
)
def test_a_process_group_of_the_script_is_a_launcher_and_workers_know_their_rank(
    method: str, story: str, tmp_path: Path
) -> None:
    """Once, where a notebook had called a model before, each forked process trained a copy."""
    done = spawned(method, tmp_path, story)
    assert done.returncode == 0, done.stdout
    net, optimizer = network()
    for x, y, _ in DataLoader(Numbers(), 4):
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in range(2):
        at_end, size, weights, of_worker = json.loads((tmp_path / f"rank{rank}").read_text())
        assert (at_end, size) == (rank, 2)
        torch.testing.assert_close(torch.tensor(weights), net[0].weight.detach())
        assert of_worker[2] == rank and of_worker[3] >= 1  # what all ranks do together is refused there


@pytest.mark.parametrize(
    ("method", "story", "words"),
    [("fork", "killed", "rank 1 has ended"), ("spawn", "raises", "ValueError: the story's error")],
)
def test_a_spawned_rank_that_fails_ends_all(method: str, story: str, words: str, tmp_path: Path) -> None:
    done = spawned(method, tmp_path, story)
    assert done.returncode != 0 and words in done.stdout, done.stdout
