"""Says how much longer training takes with a checkpoint that is written in the background.

K steps with one `save_checkpoint(background=True)` before them, until the last one ends, against the same K steps
without; the difference as a share of what a plain `save_checkpoint` takes, which training would wait for. Everything
else stays: the steps are long enough that the checkpoint is complete before they end. All three are taken in turn, on
all ranks together. With fewer idle cores than ranks, what the writing threads compute is taken from the steps.

python benchmarks/checkpoint_delay.py [--ranks 1] [--gigabytes 1] [--pairs 9] [--rows 256] [--dir DIR]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paired import hush, start_ranks

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=1)
parser.add_argument("--gigabytes", type=float, default=1.0, help="state of model and optimizer, over all ranks")
parser.add_argument("--pairs", type=int, default=9)
parser.add_argument("--rows", type=int, default=256, help="samples of a step")
parser.add_argument("--dir", default=None)
args = parser.parse_args()
start_ranks(args.ranks)

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from checkpoint import WIDTH, make_model, train  # noqa: E402

from autovaruna import AutoVaruna  # noqa: E402

SETTINGS = {"save_deployment": False, "load_deployment": False, "progress": False, "inputs": "replicated"}


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn: the steps alone, with a checkpoint beside them, and a plain checkpoint."""

    alone: float
    beside: float
    plain: float
    cpu: float

    @property
    def delay(self) -> float:
        return self.beside - self.alone


class Trial:
    """A model in training, and the folder for its checkpoints."""

    def __init__(self, num_bytes: float, num_ranks: int) -> None:
        net, self.optimizer = make_model(num_bytes)
        split = {"num_stages": num_ranks, "num_micro_batches": 2 * num_ranks} if num_ranks > 1 else {}
        self.model = AutoVaruna(net, self.optimizer, **SETTINGS, **split)
        self.batch = torch.randn(args.rows, WIDTH)
        self.steps(2)
        made = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.dir)) if self.model.world.rank == 0 else None
        self.root: Path = self.model.world.broadcast_object(made, 0, "a folder")

    def steps(self, number: int) -> None:
        train(self.model, self.optimizer, number, self.batch)

    def save(self, in_background: bool = False) -> None:
        self.model.save_checkpoint(self.root, step=0, background=in_background)

    def seconds(self, act: Callable[[], object]) -> float:
        """Returns the seconds of the slowest rank; all begin together, when the disk has nothing left to do."""
        os.sync()
        self.model.world.barrier("before a turn")
        begin = time.perf_counter()
        act()
        return max(self.model.world.gather_objects(time.perf_counter() - begin, "seconds"))

    def turn(self, num_steps: int, is_odd: bool) -> Turn:
        """Takes all three in turn."""

        def beside() -> None:
            self.save(in_background=True)
            self.steps(num_steps)

        acts = {"alone": lambda: self.steps(num_steps), "beside": beside, "plain": self.save}
        found, cpu = {}, {}
        for name in reversed(acts) if is_odd else acts:
            begin = cpu_seconds()
            found[name] = self.seconds(acts[name])
            cpu[name] = cpu_seconds() - begin
            self.model.wait_checkpoint()
        return Turn(**found, cpu=cpu["beside"] - cpu["alone"])


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spread(values: list[float], unit: Callable[[float], str]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{unit(middle)} (half of {len(values)} in {unit(low)} to {unit(high)})"


def main() -> None:
    hush()
    torch.set_num_threads(1)
    trial = Trial(args.gigabytes * 1e9, args.ranks)
    plain = statistics.median(trial.seconds(trial.save) for _ in range(3))
    step = statistics.median(trial.seconds(lambda: trial.steps(1)) for _ in range(3))
    num_steps = trial.model.world.broadcast_object(max(2, round(2.5 * plain / step)), 0, "steps")
    turns = [trial.turn(num_steps, bool(place % 2)) for place in range(args.pairs)]
    plain = statistics.median(turn.plain for turn in turns)
    if trial.model.world.rank == 0:
        print(
            f"{args.gigabytes:g} GB of state, {args.ranks} ranks of one thread on {os.cpu_count()} cores, "
            f"{num_steps} steps of {step:.2f} s, a plain checkpoint {plain:.2f} s"
        )
        print(f"delay: {spread([1e3 * turn.delay for turn in turns], '{:.0f} ms'.format)}")
        print(f"delay over a plain checkpoint: {spread([turn.delay / plain for turn in turns], '{:.1%}'.format)}")
        if args.ranks == 1:
            print(f"processor time that it takes: {spread([1e3 * turn.cpu for turn in turns], '{:.0f} ms'.format)}")
        shutil.rmtree(trial.root)


if __name__ == "__main__":
    main()
