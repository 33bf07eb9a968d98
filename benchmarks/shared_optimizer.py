"""Compares replicas that share AdamW's state with those that each have all of it.

One stage on all ranks. First what a rank holds: a run of each kind by itself, and by how much their resident bytes
differ, beside what their plans predict. Then steps of both, in turn in one run, whose weights must be bit-equal.

python benchmarks/shared_optimizer.py [--ranks 2] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys

from paired import hush, start_ranks, time_pairs

SHAPES = {"16 MiB": (1024, 4, 128), "48 MiB": (1024, 12, 64), "192 MiB": (2048, 12, 32)}
"""Width, layers and rows of models, by the bytes of their parameters."""
HELD = "held"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="how many")
parser.add_argument("--models", default=",".join(SHAPES), help="which, by the bytes of their parameters")
parser.add_argument("--quick", action="store_true", help="fewer pairs")
parser.add_argument("--alone", nargs=2, metavar=("SHAPE", "IS_SHARED"), help="print what one run holds")
ARGUMENTS = parser.parse_args()


def held(shape: str, is_shared: bool) -> tuple[float, float]:
    """Returns the resident bytes of the rank that holds most, in a run by itself, and those that are predicted."""
    command = [sys.executable, __file__, "--ranks", str(ARGUMENTS.ranks), "--alone", shape, str(int(is_shared))]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    resident, predicted = next(line for line in printed.splitlines() if line.startswith(HELD)).split()[1:]
    return float(resident), float(predicted)


if not ARGUMENTS.alone and "OMPI_COMM_WORLD_SIZE" not in os.environ:
    for name in ARGUMENTS.models.split(","):
        (whole, of_whole), (shared, of_shared) = held(name, False), held(name, True)
        fallen, expected = whole - shared, of_whole - of_shared
        print(
            f"{name} of parameters, {ARGUMENTS.ranks} ranks: {whole / 2**20:.1f} MiB resident, shared "
            f"{shared / 2**20:.1f}: {fallen / 2**20:.1f} less, {expected / 2**20:.1f} predicted: ratio "
            f"{fallen / expected:.3f}",
            flush=True,
        )
start_ranks(ARGUMENTS.ranks)

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from mpi4py import MPI  # noqa: E402
from peers import slowest  # noqa: E402
from tunable import Chain, Shape, batch_of  # noqa: E402

from autovaruna import AutoVaruna  # noqa: E402
from autovaruna.session.memory import resident_bytes  # noqa: E402


class Training:
    """Steps of one kind."""

    def __init__(self, model: Chain, shape: Shape, is_shared: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        num_ranks = ARGUMENTS.ranks
        quiet = {"load_deployment": False, "save_deployment": False, "progress": False, "profile_cache": False}
        plan = {"num_stages": 1, "num_replicas": num_ranks, "num_micro_batches": num_ranks, "recompute": "none"}
        self._wrapped = AutoVaruna(
            model, self.optimizer, inputs="replicated", shard_optimizer=is_shared, **quiet, **plan
        )
        self._batch = batch_of(shape, num_ranks)

    def step(self) -> None:
        """Makes a step."""
        self._wrapped(*self._batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def predicted_bytes(self) -> float:
        """What the plan predicts of the rank that holds most."""
        return max(self._wrapped.plan.rank_bytes())


def model_of(name: str) -> tuple[Chain, Shape]:
    """Returns a model and its shape."""
    width, num_layers, num_rows = SHAPES[name]
    torch.manual_seed(0)
    shape = Shape(num_rows, width, num_layers, width)
    return Chain(shape, 1), shape


def greatest(number: float) -> float:
    """Returns the greatest of the ranks' numbers."""
    return float(MPI.COMM_WORLD.allreduce(number, MPI.MAX))


def hold(name: str, is_shared: bool) -> None:
    """Prints what this run holds after some steps."""
    training = Training(*model_of(name), is_shared)
    for _ in range(4):
        training.step()
    resident = greatest(resident_bytes(torch.device("cpu")) or 0.0)
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(HELD, resident, training.predicted_bytes)


def race(name: str) -> None:
    """Times steps of both kinds in turn."""
    model, shape = model_of(name)
    whole, shared = Training(copy.deepcopy(model), shape, False), Training(model, shape, True)
    for _ in range(3):
        whole.step(), shared.step()
    assert all(map(torch.equal, whole.model.parameters(), shared.model.parameters())), "the weights differ"
    pairs = time_pairs(shared.step, whole.step, 15 if ARGUMENTS.quick else 40, clock=slowest)
    if MPI.COMM_WORLD.Get_rank() == 0:
        mean = statistics.mean(pairs.ratios)
        print(
            f"{name} of parameters, {ARGUMENTS.ranks} ranks: shared against whole {pairs}, mean {mean:.3f}", flush=True
        )


torch.set_num_threads(1)
hush()
if ARGUMENTS.alone:
    hold(ARGUMENTS.alone[0], ARGUMENTS.alone[1] == "1")
else:
    for name in ARGUMENTS.models.split(","):
        race(name)
