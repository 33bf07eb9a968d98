"""Trains a small model on the same batch on each rank, and goes on where an earlier run of the job has come to.

elastic_train.py STEPS SECONDS [FOLDER [WIDTH [LAYERS]]]: rank 0 prints ``begin STEP``, ``loss STEP HEX`` after each
step, and ``weights HASH`` at the end; each step takes some more seconds; FOLDER has checkpoints. In the folder that it
runs in, a file ``stop`` may say the last step, ``die`` steps at which rank 0 kills itself, once for each line; while
there is one ``pause``, ranks wait between two steps. All depends on the bits of scheduler, optimizer and generator.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from autovaruna import AutoVaruna, get_rank, get_world_size

num_steps, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
width = int(sys.argv[4]) if len(sys.argv) > 4 else 32
num_layers = int(sys.argv[5]) if len(sys.argv) > 5 else 4
stop, die, pause = Path("stop"), Path("die"), Path("pause")
torch.set_num_threads(1)  # as ranks have it, also where this is the process of the tests
torch.manual_seed(0)
layers = ((nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(num_layers))
net = nn.Sequential(*(module for layer in layers for module in layer))
optimizer = torch.optim.AdamW(net.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
size = 4 if num_layers <= 4 else 16  # of many stages each does little: they share few cores
settings = {"num_stages": get_world_size(), "micro_batch_size": size, "inputs": "replicated", "progress": False}
model = AutoVaruna(net, optimizer, **settings)
first = model.resume(folder, lr_scheduler=scheduler).step
if get_rank() == 0:
    print(f"begin {first}", flush=True)
for step in range(first, num_steps):
    if stop.exists() and step > int(stop.read_text()):
        break
    batch = torch.randn(16, width, generator=torch.Generator().manual_seed(step))
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if get_rank() == 0:
        print(f"loss {step} {loss.item().hex()}", flush=True)
        if die.exists() and (left := die.read_text().split()) and step == int(left[0]):
            die.write_text("\n".join(left[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)
    while pause.exists():
        time.sleep(0.1)
state = model.state_dict()
if get_rank() == 0:
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
    print(f"weights {digest}", flush=True)
