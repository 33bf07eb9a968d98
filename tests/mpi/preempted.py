"""Trains for long while signals come, to the ranks, or to the ``launcher``: ``preempted.py FOLDER way``; a rank.

The way is ``flag`` where the script looks for the signal; else a setting does. ``fork`` and ``spawn`` are how a worker
of a loader starts, which gets each signal before its rank.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader

from autovaruna import AutoVaruna, get_rank

FOLDER, WAY = sys.argv[1:]
METHOD = WAY if WAY in ("fork", "spawn") else None


def send(number: int) -> None:
    """Sends a signal to the workers, if there are any, and then to the rank, by a process that is neither.

    It has a session of its own: torchrun passes the signal on to all of a rank's.
    """
    workers = [str(worker.pid) for worker in multiprocessing.active_children()]
    rank = os.getppid() if WAY == "launcher" else os.getpid()
    subprocess.run(["kill", f"-{int(number)}", *workers, str(rank)], check=True, start_new_session=True)


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    optimizer = torch.optim.AdamW(net.parameters())
    settings = {} if WAY == "flag" else {"save_on_signal": FOLDER}
    settings |= {"save_deployment": False, "load_deployment": False, "progress": False, "profile_iterations": 1}
    model = AutoVaruna(net, optimizer, **settings)
    loader = DataLoader(torch.randn(80_000, 16), 8, num_workers=int(METHOD is not None), multiprocessing_context=METHOD)
    for step, batch in enumerate(loader):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 5 and get_rank() != 1:
            number = signal.SIGTERM if get_rank() or METHOD else signal.SIGUSR1
            threading.Timer(0.2 + 0.004 * get_rank(), send, (number,)).start()
        if WAY == "flag" and model.should_stop():
            model.save_checkpoint(FOLDER, step=step)
            print(f"rank {get_rank()} saved {step}", flush=True)
            break


if __name__ == "__main__":
    main()
