"""Trains a GPT of 10 M parameters under a memory limit per rank that one rank alone cannot meet.

mpirun -n 2 python examples/train_gpt.py [--tensorboard FOLDER]       the metrics, if tensorboard is installed
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import fmean, median

import torch
from gpt import GPT, draw, library_text

from autovaruna import AutoVaruna, get_rank, get_world_size

NUM_STEPS, SIZE, NUM_TOKENS = 60, 4, 128
LIMIT = "210MB"  # of which a plan leaves a tenth free; parameters, gradients and AdamW's state alone are 174 MB


def say(text: str) -> None:
    """Prints on rank 0."""
    if get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensorboard", default="", metavar="FOLDER")
    folder, board = parser.parse_args().tensorboard, None
    if folder and get_rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(folder)  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = GPT(num_tokens=NUM_TOKENS).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model = AutoVaruna(net, optimizer, memory_limit_bytes=LIMIT if get_world_size() > 1 else 0)

    text, generator = library_text(), torch.Generator().manual_seed(get_rank())
    say(f"a GPT on {get_world_size()} rank(s), with {len(text) / 1e6:.1f} MB of text")
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(1, NUM_STEPS + 1):
        inputs, targets = draw(text, SIZE, NUM_TOKENS, generator)
        start = time.perf_counter()
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for name, value in model.metrics.to_dict().items() if board is not None else ():
            board.add_scalar(name, value, step)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if step == 1:
            say(f"first step: done {time.perf_counter() - begin:.1f} s after the start")
        if step % 5 == 0:
            speed = SIZE * get_world_size() / median(seconds[-5:])
            say(f"step {step:3} of {NUM_STEPS}: loss {losses[-1]:.3f}, {speed:.1f} samples/s")

    say(str(model.metrics))
    last = fmean(losses[-10:])
    say(f"loss: {losses[0]:.3f} at the start, {last:.3f} at the end (mean of 10 steps)")
    say(f"step time: {median(seconds[5:]):.3f} s measured")
    if model.plan is not None:
        say(f"step time: {model.plan.predicted_seconds:.3f} s predicted, for {model.plan.num_stages} stages")
        say(f"deployment: {Path(model.settings.deployment_file).resolve()}")
        assert model.plan.num_stages >= 2, "one stage cannot fit into the limit"
    assert last < 0.6 * losses[0], "the model did not learn"


if __name__ == "__main__":
    main()
