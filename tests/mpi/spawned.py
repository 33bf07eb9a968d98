"""Starts two ranks by multiprocessing, as tutorials of DistributedDataParallel do: ``spawned.py METHOD FOLDER story``.

Each rank has workers as well, which run the top of this script again, with the rank's number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autovaruna import AutoVaruna, RankError, barrier, get_rank, get_world_size

AT_TOP = get_rank(), get_world_size()


class Numbers(Dataset[tuple[Tensor, Tensor, list[int]]]):
    """Yields samples, and what a worker knows of its rank: that of the top, now, and whether it may take part."""

    model: AutoVaruna | None = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, list[int]]:
        refused = 0
        for call in (barrier, lambda: self.model and self.model(torch.ones(1, 6))):
            try:
                call()
            except RankError as error:
                refused += "is none of the ranks" in str(error)
        draw = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=draw), torch.randn(2, generator=draw), [*AT_TOP, get_rank(), refused]


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))
    return net, torch.optim.SGD(net.parameters(), 0.1)


early: list[AutoVaruna] = []
"""A model that the parent has called, on one process."""


def train(rank: int, folder: Path, story: str, method: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net, optimizer = network()
    model = AutoVaruna(net, optimizer, num_stages=2, num_micro_batches=2, save_deployment=False, load_deployment=False)
    data, seen = Numbers(), []
    for step, (x, y, known) in enumerate(DataLoader(data, 4, num_workers=1, multiprocessing_context=method)):
        if step == 1 and rank == 1 and story == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1 and rank == 1 and story == "raises":
            raise ValueError("the story's error")
        nn.functional.mse_loss(model(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        data.model = model if method == "fork" else None
        seen.append([int(each[0]) for each in known])
    for called in early:
        try:
            called(torch.ones(1, 6))
        except RankError as error:
            assert "first called on one process, which is now one of 2 ranks" in str(error)
        else:
            raise AssertionError
    weights = model.state_dict()["0.weight"].tolist()
    dist.destroy_process_group()
    (folder / f"rank{rank}").write_text(json.dumps([get_rank(), get_world_size(), weights, seen[-1]]))


if __name__ == "__main__":
    method, folder, story = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if story == "called before":
        early.append(AutoVaruna(network()[0]))
        with torch.no_grad():
            early[0](torch.ones(1, 6))
    torch.multiprocessing.start_processes(train, (folder, story, method), nprocs=2, start_method=method)
