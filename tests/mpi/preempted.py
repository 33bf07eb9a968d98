"""Trains for long while signals come, to the ranks, or to the ``launcher``: ``preempted.py FOLDER way``; a rank.

The way is ``flag`` where the script looks for the signal; else a setting does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
from torch import nn

from autovaruna import AutoVaruna, get_rank

FOLDER, WAY = sys.argv[1:]
torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
optimizer = torch.optim.AdamW(net.parameters())
settings = {} if WAY == "flag" else {"save_on_signal": FOLDER}
settings |= {"save_deployment": False, "load_deployment": False, "progress": False, "profile_iterations": 1}
model = AutoVaruna(net, optimizer, **settings)
for step in range(100_000):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 5 and get_rank() != 1:
        number = signal.SIGTERM if get_rank() else signal.SIGUSR1
        process = os.getppid() if WAY == "launcher" else os.getpid()
        threading.Timer(0.2 + 0.004 * get_rank(), os.kill, (process, number)).start()
    if WAY == "flag" and model.should_stop():
        model.save_checkpoint(FOLDER, step=step)
        print(f"rank {get_rank()} saved {step}", flush=True)
        break
