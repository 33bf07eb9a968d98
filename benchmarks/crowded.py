"""Prints steps of ranks that share cores: ours and DistributedDataParallel's, measured and predicted.

A small model of 32 residual blocks, each rank with eight samples. What other programs do on a machine changes seconds
from begin to end; beside them stand the processor seconds of all ranks over the number of cores, the least that a step
takes on a quiet machine.

python benchmarks/crowded.py [--ranks 2 4 8] [--steps 20]
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice, permutations
from statistics import median

from paired import Pairs, hush, start_ranks

BLOCKS, WIDTH, LENGTH, SAMPLES, WARM_UP = 32, 64, 16, 8, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4, 8], help="jobs of so many ranks, one after another"
    )
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps that count")
    return parser.parse_args()


def measure(num_steps: int) -> None:
    """Prints one line for the ranks that there are."""
    import torch
    from mpi4py import MPI
    from peers import COMM, close_gloo, open_gloo, our_step, replicated_step
    from torch import Tensor, nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)  # type: ignore[no-any-return]

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*[Residual() for _ in range(BLOCKS)])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.blocks(x), y)

    def timed(step: Callable[[], object]) -> tuple[float, float]:
        """Returns the seconds of the slowest rank, and the processor seconds of all."""
        COMM.Barrier()
        begin, used = time.perf_counter(), time.process_time()
        step()
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        return COMM.allreduce(seconds, MPI.MAX), COMM.allreduce(used)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    hush()
    open_gloo()
    size, cores = COMM.Get_size(), len(os.sched_getaffinity(0))
    model, batch = Regression(), torch.randn(2, size * SAMPLES, LENGTH, WIDTH).unbind()
    theirs = replicated_step(copy.deepcopy(model), batch)
    ours = our_step(model, batch)
    found: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for order in islice(cycle(permutations((0, 1))), WARM_UP + num_steps):
        for way in order:
            found[way].append(timed((theirs, ours)[way]))
    seconds, used = zip(*(zip(*found[way][WARM_UP:], strict=True) for way in (0, 1)), strict=True)
    if COMM.Get_rank() == 0:
        plan = ours.model.plan  # type: ignore[attr-defined]
        least = [median(each) / min(cores, size) for each in used]
        print(
            f"{size} ranks on {cores} cores: DDP against ours {Pairs(*seconds)}; processor seconds over cores "
            f"{1e3 * least[0]:.1f} and {1e3 * least[1]:.1f} ms; predicted {1e3 * plan.predicted_seconds:.1f} ms "
            f"({plan.num_stages} stages, {plan.num_micro_batches} micro-batches)",
            flush=True,
        )
    close_gloo()


def main() -> None:
    args = arguments()
    if len(args.ranks) == 1:
        start_ranks(args.ranks[0])
        measure(args.steps)
        return
    for number in args.ranks:
        command = [sys.executable, __file__, "--ranks", str(number), "--steps", str(args.steps)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
