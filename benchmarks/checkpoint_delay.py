"""Says how much longer training takes with a checkpoint that is written in the background.

K steps with one `save_checkpoint(background=True)` before them, until the last one ends, against the same K steps
without; the difference as a share of what a plain `save_checkpoint` takes, which training would wait for. K is the
fewest steps that last one and a half times as long as a plain one, for longer ones bring more of their own spread, and
no more of the delay; how many checkpoints were complete by their end is said. Both are taken in turn, on all ranks
together, and a plain one now and then. The interval holds the median of all such pairs with a probability of 95 %,
whatever their law.

Where other programs run, most of the spread comes from the time in which the thread that trains could run and has no
core; so the same is said without that time. On a quiet machine with an idle core for each rank both agree.

Beside it stands what training waits for in the call, which copies the state.

python benchmarks/checkpoint_delay.py [--ranks 1] [--gigabytes 1] [--pairs 40] [--rows 256] [--dir DIR]
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paired import hush, interval_of_median, start_ranks

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=1)
parser.add_argument("--gigabytes", type=float, default=1.0, help="state of model and optimizer, over all ranks")
parser.add_argument("--pairs", type=int, default=40)
parser.add_argument("--rows", type=int, default=256, help="samples of a step")
parser.add_argument("--dir", default=None)
args = parser.parse_args()
start_ranks(args.ranks)

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from checkpoint import WIDTH, make_model, train  # noqa: E402

from autovaruna import AutoVaruna  # noqa: E402

SETTINGS = {"save_deployment": False, "load_deployment": False, "progress": False, "inputs": "replicated"}
PAIRS_PER_PLAIN = 3
LEAST_SECONDS = 0.003  # of a wait for something that is still written


@dataclass(frozen=True)
class Turn:
    """Seconds of the slowest rank, and how many are left without those in which the thread that trains had no core."""

    seconds: float
    seconds_on_core: float


@dataclass(frozen=True)
class Pair:
    """Some steps alone, the same with a checkpoint, the seconds of its call, and whether they had all of its delay."""

    alone: Turn
    beside: Turn
    call: float
    is_complete: bool


class Trial:
    """A model in training, and the folder for its checkpoints."""

    def __init__(self, num_bytes: float, num_ranks: int) -> None:
        net, self.optimizer = make_model(num_bytes)
        split = {"num_stages": num_ranks, "num_micro_batches": 2 * num_ranks} if num_ranks > 1 else {}
        self.model = AutoVaruna(net, self.optimizer, **SETTINGS, **split)
        self.world = self.model.world
        self.batch = torch.randn(args.rows, WIDTH)
        self.call_seconds = 0.0
        self.steps(2)
        made = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.dir)) if self.world.rank == 0 else None
        self.root: Path = self.world.broadcast_object(made, 0, "a folder")
        self.save(in_background=True)  # the first takes memory that the others use again
        self.steps(2)
        self.model.wait_checkpoint()

    def steps(self, number: int) -> None:
        train(self.model, self.optimizer, number, self.batch)

    def save(self, in_background: bool = False) -> None:
        begin = time.perf_counter()
        self.model.save_checkpoint(self.root, step=0, background=in_background)
        self.call_seconds = time.perf_counter() - begin

    def slowest(self, seconds: float) -> float:
        return max(self.world.gather_objects(seconds, "seconds"))

    def turn(self, act: Callable[[], object]) -> Turn:
        """Times something; all ranks begin together, when the disk has nothing left to do."""
        os.sync()
        self.world.barrier("before a turn")
        begin, waited = time.perf_counter(), seconds_without_core()
        act()
        seconds, waited = time.perf_counter() - begin, seconds_without_core() - waited
        return Turn(self.slowest(seconds), self.slowest(seconds - waited))

    def beside(self, num_steps: int) -> None:
        self.save(in_background=True)
        self.steps(num_steps)

    def pair(self, num_steps: int, is_odd: bool) -> Pair:
        """Takes both in turn."""
        alone = None if is_odd else self.turn(lambda: self.steps(num_steps))
        beside = self.turn(lambda: self.beside(num_steps))
        call = self.slowest(self.call_seconds)
        begin = time.perf_counter()
        self.model.wait_checkpoint()
        left = self.slowest(time.perf_counter() - begin)
        return Pair(alone or self.turn(lambda: self.steps(num_steps)), beside, call, left < LEAST_SECONDS)


def seconds_without_core() -> float:
    """Returns how long this thread could have run so far, but had no core; 0 where the system does not say."""
    try:
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:
        return 0.0


def share(values: list[float], plain: float) -> str:
    low, high = interval_of_median(values)
    middle = statistics.median(values)
    return (
        f"{1e3 * middle:.1f} ms, {middle / plain:.1%} of a plain checkpoint "
        f"(median of {len(values)}; 95 %: {low / plain:.1%} to {high / plain:.1%})"
    )


def main() -> None:
    hush()
    torch.set_num_threads(1)
    trial = Trial(args.gigabytes * 1e9, args.ranks)
    plains = [trial.turn(trial.save) for _ in range(3)]
    step = statistics.median(trial.turn(lambda: trial.steps(1)).seconds for _ in range(3))
    length = 1.5 * statistics.median(plain.seconds for plain in plains)
    num_steps = trial.world.broadcast_object(max(1, math.ceil(length / step)), 0, "steps")
    pairs = []
    for place in range(args.pairs):
        pairs.append(trial.pair(num_steps, bool(place % 2)))
        if place % PAIRS_PER_PLAIN == 0:
            plains.append(trial.turn(trial.save))
    if trial.world.rank == 0:
        plain = statistics.median(plain.seconds for plain in plains)
        on_core = statistics.median(plain.seconds_on_core for plain in plains)
        print(
            f"{args.gigabytes:g} GB of state, {args.ranks} ranks of one thread on {os.cpu_count()} cores, "
            f"{num_steps} steps of {step:.2f} s, a plain checkpoint {plain:.2f} s"
        )
        print(
            f"complete by the end of the steps: {sum(pair.is_complete for pair in pairs)} of {len(pairs)} checkpoints"
        )
        print(f"delay: {share([pair.beside.seconds - pair.alone.seconds for pair in pairs], plain)}")
        delays = [pair.beside.seconds_on_core - pair.alone.seconds_on_core for pair in pairs]
        print(f"both without waits for a core: {share(delays, on_core)}")
        print(f"training waits in the call: {share([pair.call for pair in pairs], plain)}")
        shutil.rmtree(trial.root)


if __name__ == "__main__":
    main()
