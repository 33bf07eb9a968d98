"""Compares a step of AutoVaruna on one process with one of plain PyTorch.

As it is, AutoVaruna calls the model itself; with micro-batches, it runs its own graph, schedule and executor, and is
compared with a loop over the same micro-batches.

python benchmarks/overhead.py [--pairs 40]
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from gpt import GPT, draw, library_text
from paired import hush, time_pairs
from torch import Tensor, nn

from autovaruna import AutoVaruna

SIZE, NUM_TOKENS = 8, 32


def make_plain(net: nn.Module, batch: tuple[Tensor, Tensor], num_micro_batches: int) -> Callable[[], object]:
    """Returns a step of plain PyTorch, over as many micro-batches."""
    optimizer = torch.optim.AdamW(net.parameters())
    parts = list(zip(*(tensor.chunk(num_micro_batches) for tensor in batch), strict=True))

    def step() -> float:
        losses = []
        for part in parts:
            loss = net(*part) / num_micro_batches
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().item()

    return step


def make_ours(net: nn.Module, batch: tuple[Tensor, Tensor], **settings: Any) -> Callable[[], object]:
    """Returns a step of AutoVaruna."""
    optimizer = torch.optim.AdamW(net.parameters())
    model = AutoVaruna(
        net, optimizer, load_deployment=False, save_deployment=False, progress=False, profile_cache=False, **settings
    )

    def step() -> float:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    text = library_text()
    for width in (64, 256):
        torch.manual_seed(0)
        net = GPT(width=width, num_layers=4, num_heads=4, num_tokens=NUM_TOKENS)
        batch = draw(text, SIZE, NUM_TOKENS, torch.Generator().manual_seed(0))
        for num, settings in ((1, {}), (4, {"num_micro_batches": 4})):
            ours = make_ours(copy.deepcopy(net), batch, **settings)
            pairs = time_pairs(ours, make_plain(copy.deepcopy(net), batch, num), args.pairs)
            print(f"AutoVaruna against plain PyTorch, width {width}, {num} micro-batch(es): {pairs}")


if __name__ == "__main__":
    main()
