"""Compares a step of AutoVaruna on one process with one of plain PyTorch.

As it is, AutoVaruna calls the model itself; with micro-batches, it runs its own graph, schedule and executor, and is
compared with a loop over the same micro-batches.

The interval holds the median of all such pairs with a probability of 95 %, whatever their law.

python benchmarks/overhead.py [--seconds 10]
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from gpt import GPT, draw, library_text
from paired import Pairs, hush, interval_of_median, time_pairs
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


def compare(net: nn.Module, batch: tuple[Tensor, Tensor], num_micro_batches: int, seconds: float) -> Pairs:
    """Times pairs of steps, ours and plain: half of them with models made in the other order.

    Of two equal models, steps of the one made first take up to 2 % more: it lies elsewhere in memory.
    """
    settings = {"num_micro_batches": num_micro_batches} if num_micro_batches > 1 else {}
    ways: list[Callable[[], Callable[[], object]]] = [
        lambda: make_ours(copy.deepcopy(net), batch, **settings),
        lambda: make_plain(copy.deepcopy(net), batch, num_micro_batches),
    ]
    taken: list[Pairs] = []
    num_pairs = 0  # as many in each order
    for order in ((0, 1), (1, 0)):
        steps = {place: ways[place]() for place in order}
        trial = time_pairs(steps[0], steps[1], 5)
        num_pairs = num_pairs or max(10, int(seconds / 2 / (mean(trial.first) + mean(trial.second))))
        taken.append(time_pairs(steps[0], steps[1], num_pairs))
    one, other = taken
    return Pairs(one.first + other.first, one.second + other.second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    text = library_text()
    for width in (64, 256):
        torch.manual_seed(0)
        net = GPT(width=width, num_layers=4, num_heads=4, num_tokens=NUM_TOKENS)
        batch = draw(text, SIZE, NUM_TOKENS, torch.Generator().manual_seed(0))
        for num in (1, 4):
            pairs = compare(net, batch, num, args.seconds)
            low, high = interval_of_median(pairs.ratios)
            print(
                f"AutoVaruna against plain PyTorch, width {width}, {num} micro-batch(es): {pairs}, "
                f"95 %: {low:.3f} to {high:.3f}"
            )


if __name__ == "__main__":
    main()
