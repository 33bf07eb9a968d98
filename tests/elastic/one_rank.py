"""Trains a model on one rank with all that a state can have, and prints the bits of it after each step.

one_rank.py STEPS [DIE]: goes on where the job's memory has come to; DIE is the step after which it ends at once. Each
DataLoader has a generator of its own, or it would draw from that of the script when it begins.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autovaruna import AutoVaruna, ElasticSampler

num_steps, last = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=num_steps + 1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
data = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)))
sampler = ElasticSampler(data, 8, seed=2)
model = AutoVaruna(net, optimizer, load_deployment=False, save_deployment=False, progress=False)
best: list[float] = []
info = model.resume(scaler=scaler, lr_scheduler=scheduler, sampler=sampler, extra=lambda: best)
best += info.extra or []
step = info.step or 0
print(f"begin {step}", flush=True)
while step < num_steps:
    for (features,) in DataLoader(data, batch_sampler=sampler, generator=torch.Generator()):
        loss = model(features).square().mean() * (1.0 + torch.rand(()))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        step += 1
        best = [min([loss.item(), *best])]
        bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        more = loss.item().hex(), scheduler.get_last_lr()[0].hex(), scaler.get_scale(), best[0].hex()
        print(step, hashlib.sha256(bits).hexdigest(), *more, flush=True)
        if step == last:
            os._exit(9)
        if step == num_steps:
            break
