"""Trains a small model on the same batch on each rank, and prints each step's loss and the weights, to the last bit.

train.py STEPS: rank 0 prints ``loss STEP HEX`` after each step, and ``weights HASH`` at the end.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

from autovaruna import AutoVaruna, get_rank, get_world_size

torch.manual_seed(0)
net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))))
optimizer = torch.optim.AdamW(net.parameters())
model = AutoVaruna(
    net,
    optimizer,
    num_stages=get_world_size(),
    micro_batch_size=4,
    inputs="replicated",
    load_deployment=False,
    save_deployment=False,
    progress=False,
)
for step in range(int(sys.argv[1])):
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if get_rank() == 0:
        print(f"loss {step} {loss.item().hex()}", flush=True)
state = model.state_dict()
if get_rank() == 0:
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
    print(f"weights {digest}", flush=True)
