"""Runs the benchmarks one after another and writes what they print to benchmarks/RESULTS.md.

The file says on what machine and at which commit. Ratios and efficiencies count; seconds are of that machine.

python benchmarks/run_all.py [--full] [--only NAME...]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
SCRIPTS = {
    "pipelining": "Against torch.distributed.pipelining",
    "whole": "AutoVaruna's own plan against the best by hand",
    "data_parallel": "Against DistributedDataParallel",
    "alternatives": "Beside DDP, FSDP2 and torch.distributed.pipelining",
    "network": "Over emulated hosts, beside what is predicted",
    "copies": "Steps with copies of snapshots on their way",
    "shared_optimizer": "Replicas that share AdamW's state",
    "scaling": "A step as it grows",
    "crowded": "Ranks that share cores",
    "agreement": "What ranks tell each other in a step",
    "overhead": "One rank against plain PyTorch",
    "tracing": "What a trace of events costs",
    "prediction": "Predicted seconds and bytes against measured ones",
    "checkpoint": "Checkpoints against torch.save and torch.load",
    "checkpoint_delay": "Steps with a checkpoint in the background",
}
NO_QUICK = {
    "copies": ["--pairs", "2", "--seconds", "10"],
    "agreement": ["--times", "50", "--ranks", "2", "8"],
    "overhead": ["--seconds", "6"],
    "prediction": ["--steps", "3", "--turns", "1", "--only", "1f1b"],
    "checkpoint": ["--gigabytes", "0.25"],
    "checkpoint_delay": ["--gigabytes", "0.25"],
    "crowded": ["--steps", "10"],
}
TIMEOUT_SECONDS = 900


def main() -> int:
    """Runs them; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all settings, which takes far longer than ten minutes")
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS), help="some of them")
    options = parser.parse_args()
    sections, has_failed = [head()], False
    for name in options.only:
        text, status, seconds = run(name, options.full)
        has_failed = has_failed or status != 0
        verdict = f"{seconds:.0f} s" if status == 0 else f"FAILED with status {status}"
        print(f"{name}: {verdict}\n{text}", flush=True)
        sections.append(f"## {SCRIPTS[name]}\n\n`benchmarks/{name}.py`, {verdict}\n\n```\n{text}\n```\n")
        RESULTS.write_text("\n".join(sections), encoding="utf-8")
    return int(has_failed)


def run(name: str, is_full: bool) -> tuple[str, int, float]:
    """Runs one benchmark; returns what it printed, its status, and its seconds."""
    options = [] if is_full else NO_QUICK.get(name, ["--quick"])
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options]
    begin = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=None if is_full else TIMEOUT_SECONDS,
        check=False,
    )
    lines = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    return lines.strip("\n"), done.returncode, time.monotonic() - begin


def head() -> str:
    """Returns the first lines: the machine, the versions, the commit, and how busy the machine is."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=False
    ).stdout.strip()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return (
        f"# Results\n\n{date.today()}, commit {commit or 'unknown'}. {cores} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, mpi4py {version('mpi4py')}; load at the start "
        f"{load:.1f}. Ranks have one thread each. Ratios are medians of pairs A B A B within one run; the spread is "
        "that of the middle half.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
