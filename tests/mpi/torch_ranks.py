"""What `test_torchrun.py` runs on ranks that torchrun started: ``torch_ranks.py story folder``, a rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autovaruna import AutoVaruna, InputError, barrier, get_rank, get_world_size
from tests.mpi.world_on_ranks import try_laws


def rank(folder: Path) -> None:
    print(get_rank(), get_world_size())


def train(folder: Path, channel: str = "auto") -> AutoVaruna:
    """Trains a model of two stages, one with two replicas if there are three ranks, and keeps the losses."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.Dropout(0.1), nn.Linear(300, 4))
    optimizer = torch.optim.Adam(net.parameters())
    stage_ranks = [[0], [1, 2]] if int(os.environ.get("WORLD_SIZE", "3")) == 3 else [[0], [1]]
    model = AutoVaruna(net, optimizer, stage_ranks=stage_ranks, cuts=["2"], num_micro_batches=4, channel=channel)
    torch.manual_seed(1 + get_rank())
    losses = []
    for _ in range(4):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (folder / f"{channel}{get_rank()}").write_text(json.dumps(losses))
    return model


def laws_and_training(folder: Path) -> None:
    """Tries the laws, trains, and trains once more with the script's own group of torch.distributed, through gloo.

    The first model goes on afterwards.
    """
    (folder / f"broken{get_rank()}").write_text(json.dumps(try_laws()))
    first, batch = train(folder).eval(), torch.ones(4, 6)
    with torch.no_grad():
        before = first(batch)
    dist.init_process_group("gloo")
    train(folder, "gloo")
    with torch.no_grad():
        assert torch.equal(first(batch), before)
    loss = torch.tensor(float(get_rank()))
    dist.all_reduce(loss)
    loss /= get_world_size()
    assert loss == (dist.get_world_size() - 1) / 2  # on every rank, as a schedule that goes by it needs
    refuse_numbers_of_others(first)
    dist.destroy_process_group()


def refuse_numbers_of_others(model: AutoVaruna) -> None:
    """Once, other ranks waited for ever for a gradient that this one does not hold, where a script averaged them."""
    away = next(each for each in model.parameters() if each.is_meta)
    try:
        dist.all_reduce(away.data)
    except InputError as error:
        assert "leaves their sums, means and broadcasts out" in str(error)
    else:
        raise AssertionError("not refused")


def begin(folder: Path) -> None:
    """Meets the other ranks, and notes the time."""
    barrier()
    (folder / f"fault{get_rank()}").write_text(repr(time.time()))


def error(folder: Path) -> None:
    """Fails on rank 1 while the others compute."""
    begin(folder)
    if get_rank() == 1:
        raise ValueError("the story's error")
    time.sleep(60)


def restarted(folder: Path) -> None:
    """Kills rank 1 of the first attempt after its training."""
    train(folder)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0" and get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()
    (folder / f"attempt{get_rank()}").write_text(attempt)


def vanish(folder: Path) -> None:
    """Kills rank 1 while the others compute."""
    begin(folder)
    if get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def ends_early(folder: Path) -> None:
    """Ends rank 1 while the others wait for it."""
    begin(folder)
    if get_rank() != 1:
        barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
