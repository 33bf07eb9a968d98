"""Says how much longer training takes with a checkpoint that is written in the background.

K steps with one `save_checkpoint(background=True)` before them, until the last one ends, against the same K steps
without; the difference as a share of what a plain `save_checkpoint` takes, which training would wait for. Everything
else stays: K is the fewest steps that last one and a half times as long as a plain one, for longer ones bring more of
their own spread, and no more of the delay; how many checkpoints were complete by their end is said. Both are taken in
turn, on all ranks together, and a plain one now and then. The interval holds the median of all such pairs with a
probability of 95 %, whatever their law.

Where other programs run, most of the spread comes from the time in which the thread that trains could run and has no
core; so the same is said without that time. On a quiet machine with an idle core for each rank both agree.

Beside it stands what is known of where the delay comes from: what training waits for in the call, and before the
optimizer's next step; and what copies and sums take of a processor, once for each byte. With an idle core for each
rank they take none of the training's time; without any, and without bubbles, the delay cannot be less.

The C library keeps the memory that it has (steps then ask the system for none): what the system takes to give memory,
a quarter of a step, varies by more than the delay.

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
from typing import Any

from paired import hush, interval_of_median, start_ranks

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=1)
parser.add_argument("--gigabytes", type=float, default=1.0, help="state of model and optimizer, over all ranks")
parser.add_argument("--pairs", type=int, default=40)
parser.add_argument("--rows", type=int, default=256, help="samples of a step")
parser.add_argument("--dir", default=None)
args = parser.parse_args()
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(256 << 20)}
start_ranks(args.ranks)

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from checkpoint import WIDTH, make_model, train  # noqa: E402

from autovaruna import AutoVaruna  # noqa: E402
from autovaruna.checkpoint.checksum import checksum  # noqa: E402
from autovaruna.checkpoint.direct import chunk_memory  # noqa: E402
from autovaruna.checkpoint.layout import lay_out  # noqa: E402

SETTINGS = {"save_deployment": False, "load_deployment": False, "progress": False, "inputs": "replicated"}
PAIRS_PER_PLAIN = 3
LEAST_SECONDS = 0.003  # of a wait for something that is still written


@dataclass(frozen=True)
class Turn:
    """Seconds of some steps, and how many are left without those in which the thread that trains had no core."""

    seconds: float
    seconds_on_core: float


@dataclass(frozen=True)
class Pair:
    """Seconds of the steps alone, of those with a checkpoint, and of what training waits for in these.

    Whether the checkpoint was complete when they ended says whether they had all of its delay.
    """

    alone: Turn
    beside: Turn
    call: float
    before_step: float
    is_complete: bool

    @property
    def delay(self) -> float:
        return self.beside.seconds - self.alone.seconds

    @property
    def delay_on_core(self) -> float:
        return self.beside.seconds_on_core - self.alone.seconds_on_core


class StepWaits:
    """What an optimizer's steps wait for: what is hooked to them between `hook_begin` and `hook_end`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin = 0.0

    def hook_begin(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._note_begin)

    def hook_end(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._note_end)

    def _note_begin(self, *_: Any) -> None:
        self._begin = time.perf_counter()

    def _note_end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._begin


class Trial:
    """A model in training, and the folder for its checkpoints."""

    def __init__(self, num_bytes: float, num_ranks: int) -> None:
        net, self.optimizer = make_model(num_bytes)
        split = {"num_stages": num_ranks, "num_micro_batches": 2 * num_ranks} if num_ranks > 1 else {}
        self.waits = StepWaits()
        self.waits.hook_begin(self.optimizer)
        self.model = AutoVaruna(net, self.optimizer, **SETTINGS, **split)
        self.world = self.model.world
        self.batch = torch.randn(args.rows, WIDTH)
        self.waits.hook_end(self.optimizer)
        self.steps(2)
        made = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.dir)) if self.world.rank == 0 else None
        self.root: Path = self.world.broadcast_object(made, 0, "a folder")
        self.save(in_background=True)  # the first takes memory that the others use again
        self.steps(2)
        self.model.wait_checkpoint()

    def steps(self, number: int) -> None:
        train(self.model, self.optimizer, number, self.batch)

    def save(self, in_background: bool = False) -> None:
        self.model.save_checkpoint(self.root, step=0, background=in_background)

    def slowest(self, seconds: float) -> float:
        return max(self.world.gather_objects(seconds, "seconds"))

    def seconds(self, act: Callable[[], object]) -> float:
        """Returns the seconds of the slowest rank; all begin together, when the disk has nothing left to do."""
        return self.turn(act).seconds

    def turn(self, act: Callable[[], object]) -> Turn:
        """Returns the seconds of the slowest rank, as `seconds`, and how many are left without waits for a core."""
        os.sync()
        self.world.barrier("before a turn")
        begin, waited = time.perf_counter(), seconds_without_core()
        act()
        seconds, waited = time.perf_counter() - begin, seconds_without_core() - waited
        return Turn(self.slowest(seconds), self.slowest(seconds - waited))

    def pair(self, num_steps: int, is_odd: bool) -> Pair:
        """Takes both in turn."""
        self.call_seconds = self.waits.seconds = 0.0

        def beside() -> None:
            begin = time.perf_counter()
            self.save(in_background=True)
            self.call_seconds = time.perf_counter() - begin
            self.steps(num_steps)

        acts = {"alone": lambda: self.steps(num_steps), "beside": beside}
        found = {}
        for name in reversed(acts) if is_odd else acts:
            found[name] = self.turn(acts[name])
            if name == "beside":
                left = self.seconds_left()
        waits = self.slowest(self.call_seconds), self.slowest(self.waits.seconds)
        return Pair(**found, call=waits[0], before_step=waits[1], is_complete=left < LEAST_SECONDS)

    def seconds_left(self) -> float:
        """Waits for the checkpoint on its way, and returns how long that took the slowest rank."""
        begin = time.perf_counter()
        self.model.wait_checkpoint()
        return self.slowest(time.perf_counter() - begin)

    def processor_seconds(self) -> float:
        """Returns what this rank needs at least to copy and sum its part, chunk by chunk to the same memory."""
        state = [each for entries in self.optimizer.state.values() for each in entries.values()]
        every = [*self.model.module.parameters(), *(each for each in state if isinstance(each, torch.Tensor))]
        own = lay_out({str(place): each for place, each in enumerate(every) if not each.is_meta}, {})
        memory = chunk_memory()
        memory.fill(0)
        begin = time.thread_time()
        for chunk in range(own.num_chunks):
            checksum(own.fill(chunk, memory))
        return time.thread_time() - begin


def seconds_without_core() -> float:
    """Returns how long this thread could have run so far, but had no core; 0 where the system does not say."""
    try:
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:
        return 0.0


def with_interval(values: list[float], unit: Callable[[float], str]) -> str:
    low, high = interval_of_median(values)
    return f"{unit(statistics.median(values))} (median of {len(values)}; 95 %: {unit(low)} to {unit(high)})"


def main() -> None:
    hush()
    torch.set_num_threads(1)
    trial = Trial(args.gigabytes * 1e9, args.ranks)
    plains = [trial.seconds(trial.save) for _ in range(3)]
    step = statistics.median(trial.seconds(lambda: trial.steps(1)) for _ in range(3))
    num_steps = trial.world.broadcast_object(max(1, math.ceil(1.5 * statistics.median(plains) / step)), 0, "steps")
    pairs = []
    for place in range(args.pairs):
        pairs.append(trial.pair(num_steps, bool(place % 2)))
        if place % PAIRS_PER_PLAIN == 0:
            plains.append(trial.seconds(trial.save))
    plain = statistics.median(plains)
    needed = trial.slowest(statistics.median(trial.processor_seconds() for _ in range(5)))
    if trial.world.rank == 0:
        print(
            f"{args.gigabytes:g} GB of state, {args.ranks} ranks of one thread on {os.cpu_count()} cores, "
            f"{num_steps} steps of {step:.2f} s, a plain checkpoint {plain:.2f} s"
        )
        num_complete = sum(pair.is_complete for pair in pairs)
        print(f"complete by the end of the steps: {num_complete} of {len(pairs)} checkpoints")
        delays = [pair.delay for pair in pairs]
        print(f"delay: {with_interval([1e3 * delay for delay in delays], '{:.1f} ms'.format)}")
        print(f"delay over a plain checkpoint: {with_interval([delay / plain for delay in delays], '{:.1%}'.format)}")
        on_core = [pair.delay_on_core / plain for pair in pairs]
        print(f"the same without waits for a core: {with_interval(on_core, '{:.1%}'.format)}")
        for seconds, words in (
            (statistics.median(pair.call for pair in pairs), "training waits in the call"),
            (statistics.median(pair.before_step for pair in pairs), "and before the optimizer's steps"),
            (needed, "what copies and sums need of each core: the least delay without idle cores and bubbles"),
        ):
            print(f"{words}: {1e3 * seconds:.1f} ms, {seconds / plain:.1%} of a plain checkpoint")
        shutil.rmtree(trial.root)


if __name__ == "__main__":
    main()
