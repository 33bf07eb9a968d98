"""Compares steps whose metrics are read with others: processor time, paired, and calls of Python functions.

Both are the same model, the same process: every other step reads `model.metrics.to_dict()`, and so has the norm of
gradients measured. Each process counts for itself.

python benchmarks/metrics.py [--pairs 200]
mpirun -n 2 python benchmarks/metrics.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from gpt import GPT, draw, library_text
from paired import Pairs, hush, interval_of_median

from autovaruna import AutoVaruna, get_rank

SIZE, NUM_TOKENS = 8, 64


def processor_seconds(act: Callable[[], object]) -> float:
    """Returns the processor time of this thread in a call."""
    begin = time.thread_time()
    act()
    return time.thread_time() - begin


def num_calls(act: Callable[[], object]) -> int:
    """Returns how many Python functions a call calls."""
    count = 0

    def see(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    pairs = parser.parse_args().pairs
    hush()
    torch.manual_seed(0)
    net = GPT(num_tokens=NUM_TOKENS)
    optimizer = torch.optim.AdamW(net.parameters())
    model = AutoVaruna(net, optimizer, load_deployment=False, save_deployment=False, progress=False)
    batch = draw(library_text(), SIZE, NUM_TOKENS, torch.Generator().manual_seed(get_rank()))

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def read_step() -> None:
        step()
        model.metrics.to_dict()

    for _ in range(5):
        read_step()
    seconds: list[tuple[float, float]] = []
    for _ in range(pairs):
        # what is read now is measured in the step that follows, so two steps of each kind come together
        read = processor_seconds(read_step) + processor_seconds(read_step)
        step()
        plain = processor_seconds(step) + processor_seconds(step)
        seconds.append((read, plain))
    found = Pairs(*zip(*seconds, strict=True))
    calls = [num_calls(read_step), num_calls(read_step), num_calls(step), num_calls(step)]
    if get_rank() == 0:
        low, high = interval_of_median(found.ratios)
        print(f"processor time, two steps read against two not: {found}")
        print(f"the median ratio lies in {low:.4f} to {high:.4f} (95 %)")
        print(f"calls of Python functions in a step: {calls[:2]} read, {calls[2:]} not")
        print(model.metrics)


if __name__ == "__main__":
    main()
