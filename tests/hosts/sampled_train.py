"""Trains on the samples that `ElasticSampler` gives each rank, for one epoch.

sampled_train.py SAMPLES BATCH SECONDS: each rank prints ``took STEP NUMBERS...`` after each step, rank 0 also ``loss
STEP VALUE``, of the global batch; each step takes some more seconds, and thirty times as many while there is a file
``slow``.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autovaruna import AutoVaruna, ElasticSampler, get_rank, get_world_size

QUIET = {"load_deployment": False, "save_deployment": False, "progress": False}


class Loss(nn.Module):
    """Returns the mean squared error of a small network on samples that are named by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (self.net(features).squeeze(1) - features.sum(1)).square().mean()


def dataset(num_samples: int) -> TensorDataset:
    """Returns the samples, each with its number."""
    features = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.arange(num_samples), features)


if __name__ == "__main__":
    num_samples, batch_size, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(0)
    net = Loss()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    model = AutoVaruna(net, optimizer, num_stages=1, num_replicas=get_world_size(), micro_batch_size=4, **QUIET)
    data = dataset(num_samples)
    sampler = ElasticSampler(data, batch_size, seed=5)
    step = model.resume(sampler=sampler).step
    for numbers, features in DataLoader(data, batch_sampler=sampler):
        loss = model(features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"took {step} {' '.join(map(str, numbers.tolist()))}", flush=True)
        if get_rank() == 0:
            print(f"loss {step} {loss.item()}", flush=True)
        step += 1
        time.sleep(30 * seconds if os.path.exists("slow") else seconds)
