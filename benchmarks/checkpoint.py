"""Compares a checkpoint, on one process, with what PyTorch does with the same bytes, both down to the disk.

Out: `save_checkpoint` against `torch.save` and fsync. In: `load_checkpoint`, every checksum compared, against
`torch.load` and loading the states. In the background: how much memory it takes beside the state; how much longer steps
take meanwhile, `checkpoint_delay.py` says.

python benchmarks/checkpoint.py [--gigabytes 1] [--pairs 5] [--dir DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from paired import hush, time_pairs
from torch import nn

from autovaruna import AutoVaruna

WIDTH = 2048


def make_model(num_bytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model that, with its optimizer's state, has about `num_bytes`; its first step is done."""
    num_layers = max(1, round(num_bytes / 3 / (4 * WIDTH * WIDTH)))
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    return net, torch.optim.Adam(net.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, batch: torch.Tensor) -> None:
    """Trains for some steps."""
    for _ in range(num_steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_plainly(net: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Saves as PyTorch does, down to the disk."""
    with open(path, "wb") as file:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def load_plainly(net: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Loads what `save_plainly` saved."""
    states = torch.load(path)
    net.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


def peak_of(act: Callable[[], object]) -> int:
    """Returns by how many bytes the anonymous memory of this process grows at most while `act` runs."""
    process, peak, is_over = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            memory = process.memory_info()
            peak[0] = max(peak[0], memory.rss - memory.shared)

    before = process.memory_info().rss - process.memory_info().shared
    thread = threading.Thread(target=watch)
    thread.start()
    act()
    is_over.set()
    thread.join()
    return max(0, peak[0] - before)


def out_and_in(model: AutoVaruna, optimizer: torch.optim.Optimizer, root: Path, num_pairs: int) -> None:
    """Prints the ratios of saving and loading."""
    net = model.module

    def save() -> None:
        model.save_checkpoint(root, step=0)

    saving = time_pairs(save, lambda: save_plainly(net, optimizer, root / "plain.pt"), num_pairs, 1)
    print(f"out, against torch.save, both fsynced: {saving}")
    loading = time_pairs(
        lambda: model.load_checkpoint(root), lambda: load_plainly(net, optimizer, root / "plain.pt"), num_pairs, 1
    )
    print(f"in, against torch.load and load_state_dict: {loading}")
    bare = time_pairs(lambda: model.load_checkpoint(root), lambda: torch.load(root / "plain.pt"), num_pairs, 1)
    print(f"in, against torch.load alone: {bare}")
    together = [
        (a + b) / (c + d) for a, b, c, d in zip(saving.first, bare.first, saving.second, bare.second, strict=True)
    ]
    print(f"out and in together, against torch.save and torch.load: ratio {statistics.median(together):.3f}")


def in_background(model: AutoVaruna, root: Path, num_bytes: int) -> None:
    """Prints the memory that a checkpoint in the background takes."""

    def save() -> None:
        model.save_checkpoint(root, step=0, background=True)
        model.wait_checkpoint()

    print(f"memory that one in the background takes: {peak_of(save) / num_bytes:.2f} of the state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    hush()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    net, optimizer = make_model(args.gigabytes * 1e9)
    model = AutoVaruna(net, optimizer)
    train(model, optimizer, 1, torch.randn(8, WIDTH))
    num_bytes = sum(3 * 4 * parameter.numel() for parameter in net.parameters())
    print(f"{num_bytes / 1e9:.2f} GB of state")
    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.dir))
    try:
        out_and_in(model, optimizer, root, args.pairs)
        in_background(model, root, num_bytes)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
