"""Trains a model that was built on ``meta``; run on several ranks by `test_meta.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna


class Net(nn.Module):
    """Has weights, buffers and a normalisation, each with an initialiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.norm(torch.relu(self.first(x)))), y)


def train(num_stages: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Returns the losses of three steps, the whole state, and the parameters that this rank holds."""
    with torch.device("meta"):
        net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model = AutoVaruna(
        net,
        optimizer,
        cuts=("last",)[: num_stages - 1],  # whatever a busy machine measures
        num_micro_batches=2,
        inputs="replicated",
        seed=1,
        load_deployment=False,
        save_deployment=False,
        profile_iterations=1,
    )
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 8, generator=generator), torch.arange(8) % 4
    losses = []
    for _ in range(3):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (
        losses,
        model.state_dict(),
        sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta),
    )
