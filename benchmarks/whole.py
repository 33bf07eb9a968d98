"""Compares AutoVaruna's own plan with the better of DistributedDataParallel and torch.distributed.pipelining's best.

Two ranks, one thread each, one global batch. Theirs is what a user would find by hand: every cut between layers, GPipe
and 1F1B, several numbers of micro-batches, each tried out; or data parallelism. A model whose stages would pass more
than one tensor (an encoder and a decoder) is refused by torch.distributed.pipelining: there DDP alone stands for it.

python benchmarks/whole.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from paired import hush, start_ranks, time_pairs

start_ranks(2)
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
import torch.nn.functional as F  # noqa: E402
from gpt import Layer  # noqa: E402
from peers import Batch, close_gloo, fastest_of, open_gloo, our_step, pipeline_step, replicated_step, slowest  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from autovaruna import get_rank  # noqa: E402

WIDTH, NUM_TOKENS, NUM_WORDS = 192, 64, 256


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of a micro-batch."""
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))


class Chained(nn.Module):
    """Layers one after another, and the loss: what both sides can run."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(x, targets)


class Residual(nn.Module):
    """A block of a ResNet, without statistics over the batch, which the two sides would take over other samples."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, 1)
        self.second = nn.Conv2d(num_out, num_out, 3, 1, 1)
        self.short = nn.Conv2d(num_in, num_out, 1, stride)
        self.norm1, self.norm2 = nn.GroupNorm(8, num_out), nn.GroupNorm(8, num_out)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


class Translator(nn.Module):
    """An encoder, and a decoder each of whose layers looks at what the encoder gave: T5 in small."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        make = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**make) for _ in range(num_layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**make) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        memory = y = self.words(x)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return cross_entropy(self.head(y), targets)


@dataclass(frozen=True)
class Task:
    """A model and its global batch."""

    model: nn.Module
    batch: Batch


def tasks() -> dict[str, Task]:
    """Returns what is compared."""
    torch.manual_seed(0)
    words = torch.randint(NUM_WORDS, (32, NUM_TOKENS)), torch.randint(NUM_WORDS, (32, NUM_TOKENS))
    gpt = [nn.Embedding(NUM_WORDS, WIDTH), *(Layer(WIDTH, 4) for _ in range(6)), nn.Linear(WIDTH, NUM_WORDS)]
    sizes = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    resnet = [
        *(Residual(*each) for each in sizes),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    ]
    images = torch.randn(32, 3, 24, 24), torch.randint(10, (32,))
    widths = [64, 64, 64, 2048, 2048, 64, 64, 10]
    lopsided = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    numbers = torch.randn(256, 64), torch.randint(10, (256,))
    return {
        "GPT": Task(Chained(gpt), words),
        "ResNet": Task(Chained(resnet), images),
        "lopsided": Task(Chained(lopsided), numbers),
        "T5 in small": Task(Translator(3), words),
    }


def by_hand(task: Task, is_quick: bool) -> tuple[str, Callable[[], float]]:
    """Returns the fastest of what a user could set up by hand, and its name."""
    found = [("DDP", replicated_step(copy.deepcopy(task.model), task.batch))]
    if not isinstance(task.model, Chained):
        return found[0]
    num_layers = len(task.model.layers)
    cuts = range(1, num_layers) if not is_quick else range(num_layers // 2 - 1, num_layers // 2 + 2)
    for cut in cuts:
        for num_micro_batches in (4, 8) if is_quick else (2, 4, 8, 16):
            for schedule in ("1f1b",) if is_quick else ("1f1b", "gpipe"):
                layers = copy.deepcopy(task.model).layers
                part = nn.Sequential(*(layers[:cut] if get_rank() == 0 else layers[cut:]))
                step = pipeline_step(part, cross_entropy, task.batch, num_micro_batches, schedule)
                found.append((f"pipeline cut at {cut}, {num_micro_batches} micro-batches, {schedule}", step))
    return fastest_of(found, 2 if is_quick else 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer ways by hand, fewer pairs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    open_gloo()
    ratios = []
    for name, task in tasks().items():
        best, theirs = by_hand(task, args.quick)
        ours = our_step(copy.deepcopy(task.model), task.batch)
        pairs = time_pairs(theirs, ours, 8 if args.quick else 30, clock=slowest)
        ratios.append(median(pairs.ratios))
        if get_rank() == 0:
            plan = ours.model.plan  # type: ignore[attr-defined]
            stages = " + ".join(str(len(stage.ranks)) for stage in plan.stages)
            mine = f"{stages} ranks, {plan.num_micro_batches} micro-batches"
            print(f"{name}: theirs ({best}) against ours ({mine}): {pairs}", flush=True)
    if get_rank() == 0:
        print(f"theirs / ours: median {median(ratios):.3f}, least {min(ratios):.3f}", flush=True)
    close_gloo()


if __name__ == "__main__":
    main()
