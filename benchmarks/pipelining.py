"""Compares a step of AutoVaruna with one of torch.distributed.pipelining, on two ranks.

The demo's GPT, the same cut, micro-batches, batch and optimizer, 1F1B on both sides, one thread a rank; theirs talks
through gloo. First the losses of three steps must agree; then steps are timed in pairs. Beside them stands the time
that no pipeline can beat, from what each stage takes alone.

python benchmarks/pipelining.py [--cut 3] [--micro-batches 8] [--size 16] [--pairs 30]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from paired import hush, seconds_of, start_ranks, time_pairs

start_ranks(2)
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpt import GPT, draw, library_text  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402

from autovaruna import AutoVaruna, get_rank  # noqa: E402

RANK = get_rank()
COMM = MPI.COMM_WORLD


class Part(nn.Module):
    """One of two parts of the GPT, as torch.distributed.pipelining wants it: cut by hand."""

    def __init__(self, gpt: GPT, cut: int, index: int) -> None:
        super().__init__()
        self.layers = gpt.layers[:cut] if index == 0 else gpt.layers[cut:]
        self.bytes = gpt.bytes if index == 0 else None
        self.places = gpt.places if index == 0 else None
        self.last = nn.Sequential(gpt.norm, gpt.head) if index == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.bytes is not None:
            x = self.bytes(x) + self.places
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(x)
        return out


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of a micro-batch."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def make_theirs(gpt: GPT, args: argparse.Namespace, batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    """Returns a function that runs a step of torch.distributed.pipelining and returns its loss."""
    if RANK == 0:
        port = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        COMM.bcast(port.port)
        store: dist.Store = port
    else:
        store = dist.TCPStore("127.0.0.1", COMM.bcast(None), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    part = Part(gpt, args.cut, RANK)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    stage = PipelineStage(part, RANK, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=cross_entropy)

    def step() -> float:
        losses: list[Tensor] = []
        if RANK == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else 0.0

    return step


def make_ours(gpt: GPT, args: argparse.Namespace, batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    """Returns a function that runs a step of AutoVaruna and returns its loss."""
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    model = AutoVaruna(
        gpt,
        optimizer,
        num_stages=2,
        num_micro_batches=args.micro_batches,
        cuts=[f"layers.{args.cut}"],
        schedule="1f1b",
        recompute="none",
        inputs="replicated",
        load_deployment=False,
        save_deployment=False,
        progress=False,
    )

    def step() -> float:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def slowest(function: Callable[[], object]) -> float:
    """Calls a function on all ranks at once and returns the seconds of the slowest."""
    COMM.Barrier()
    seconds = seconds_of(function)
    return float(COMM.allreduce(seconds, MPI.MAX))


def bound(gpt: GPT, args: argparse.Namespace, batch: tuple[Tensor, Tensor]) -> float:
    """Returns ``max_s [ sum_{j<s} (F_j + B_j) + M (F_s + B_s) ]`` from the stages alone; messages take no time."""
    part = Part(gpt, args.cut, RANK)
    size = len(batch[0]) // args.micro_batches
    given = batch[0][:size] if RANK == 0 else torch.randn(size, batch[0].shape[1], gpt.places.shape[1])
    given.requires_grad_(given.is_floating_point())

    def work() -> None:
        out = part(given)
        (cross_entropy(out, batch[1][:size]) if RANK == 1 else out.sum()).backward()

    found = COMM.allgather(median([slowest_alone(work) for _ in range(15)][5:]))
    return max(args.micro_batches * found[0], found[0] + args.micro_batches * found[1])


def slowest_alone(work: Callable[[], object]) -> float:
    """Times this rank's own work, while the other does its own."""
    COMM.Barrier()
    return seconds_of(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("cut", 3), ("micro-batches", 8), ("size", 16), ("pairs", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    torch.manual_seed(0)
    gpt = GPT()
    batch = draw(library_text(), args.size, 128, torch.Generator().manual_seed(0))
    seconds = bound(copy.deepcopy(gpt), args, batch)
    theirs, ours = make_theirs(copy.deepcopy(gpt), args, batch), make_ours(gpt, args, batch)
    for _ in range(3):
        first, second = ours(), COMM.bcast(theirs(), root=1)
        assert abs(first - second) <= 1e-5 * abs(second), f"the losses differ: {first} and {second}"
    pairs = time_pairs(ours, theirs, args.pairs, clock=slowest)
    if RANK == 0:
        print(f"AutoVaruna against torch.distributed.pipelining, {args.micro_batches} micro-batches: {pairs}")
        print(f"Over the bound of {1e3 * seconds:.2f} ms (stages alone, no messages, no optimizer): "
              f"{median(pairs.first) / seconds:.3f} and {median(pairs.second) / seconds:.3f}")  # fmt: skip
    COMM.Barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
