"""Trains a GPT of 10 M parameters under a memory limit per rank that one rank alone cannot meet.

mpirun -n 2 python examples/train_gpt.py
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from gpt import GPT, draw, library_text
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from autovaruna import AutoVaruna, get_rank, get_world_size

NUM_STEPS, SIZE, NUM_TOKENS = 80, 4, 128
LIMIT = "170MB"  # parameters, gradients and AdamW's state are 174 MB


def train() -> None:
    begin = time.perf_counter()
    torch.manual_seed(0)
    net = GPT(num_tokens=NUM_TOKENS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    limit = {"memory_limit_bytes": LIMIT} if get_world_size() > 1 else {}
    model = AutoVaruna(net, optimizer, **limit)

    text, generator = library_text(), torch.Generator().manual_seed(get_rank())
    losses, seconds = [], []
    with Reporter(f"training on {len(text) / 1e6:.1f} MB of text") as say:
        for step in range(NUM_STEPS):
            inputs, targets = draw(text, SIZE, NUM_TOKENS, generator)
            start = time.perf_counter()
            loss = model(inputs, targets)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses, seconds = [*losses, loss.item()], [*seconds, time.perf_counter() - start]
            if step == 0:
                say(f"first step: done {time.perf_counter() - begin:.1f} s after the start")
            say.progress(step + 1, losses[-1], SIZE * get_world_size() / statistics.median(seconds[-10:]))

        last = statistics.fmean(losses[-10:])
        say(f"loss: {losses[0]:.3f} at the start, {last:.3f} at the end (mean of 10 steps)")
        say(f"step time: {statistics.median(seconds[5:]):.3f} s measured")
        if model.plan is not None:
            say(f"step time: {model.plan.predicted_seconds:.3f} s predicted, for {model.plan.num_stages} stages")
            say(f"deployment: {Path(model.settings.deployment_file).resolve()}")
            assert model.plan.num_stages >= 2, "one stage cannot fit"
    assert last < 0.6 * losses[0], "the model did not learn"


class Reporter(Progress):
    """Shows one line of progress on rank 0; where there is no terminal, a line every ten steps."""

    def __init__(self, title: str) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        super().__init__(*columns, console=Console(quiet=get_rank() != 0), transient=True)
        self.task = self.add_task("training", total=NUM_STEPS)
        self(title)

    def __call__(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def progress(self, step: int, loss: float, speed: float) -> None:
        text = f"loss {loss:.3f}, {speed:.1f} samples/s"
        self.update(self.task, completed=step, description=text)
        if step % 10 == 0 and not self.console.is_terminal:
            self(f"step {step:3d} of {NUM_STEPS}: {text}")


if __name__ == "__main__":
    train()
