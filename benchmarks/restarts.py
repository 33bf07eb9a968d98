"""Kills a rank of a small job again and again, and prints what manager, keeper and host have more of each time.

The job trains on ranks of this machine under `autovaruna run`. A rank is killed as soon as the job has come further
than before, so that each start is from the newest state in memory.

python benchmarks/restarts.py [--restarts N] [--ranks R] [--every K]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "hosts" / "elastic_train.py"
SLACK_FILES, SLACK_BYTES = 8, 48 << 20
"""By how much less than this many files, threads and bytes processes may differ from what they had early on."""
_EARLY = 20
_LOSS = re.compile(r"\[0\] loss (\d+) ")


def processes(words: str) -> list[int]:
    """Returns the processes of this machine whose command lines hold some words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words in line:
                found.append(int(entry.name))
    return sorted(found)


def held(process: int) -> tuple[int, int, int]:
    """Returns the open files, threads and resident bytes of a process."""
    place = Path(f"/proc/{process}")
    pages = int((place / "statm").read_text().split()[1])
    return len(os.listdir(place / "fd")), len(os.listdir(place / "task")), pages * os.sysconf("SC_PAGE_SIZE")


def num_files(standby: int) -> int:
    """Returns how many files a job has in memory, and all of Open MPI have beside them."""
    line = Path(f"/proc/{standby}/cmdline").read_bytes().split(b"\0")
    folder = next(Path(word.decode()).parent for word in line if word.startswith(b"/dev/shm/"))
    own = sum(len(names) + len(folders) for _, folders, names in os.walk(folder))
    return own + len([*Path("/dev/shm").glob("sm_segment.*"), *Path(tempfile.gettempdir()).glob("ompi.*")])


def main() -> int:
    """Kills; returns 1 if anything has grown, or the job has not come to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=1000)
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autovaruna-restarts-") as folder:
        return kill_again_and_again(options, Path(folder))


def kill_again_and_again(options: argparse.Namespace, folder: Path) -> int:
    """Kills a rank each time that the job has come further; returns the status of this program."""
    command = [
        sys.executable,
        "-m",
        "autovaruna",
        "run",
        "--ranks_per_host",
        options.ranks,
        "--max_restarts",
        "1000000",
    ]
    job = subprocess.Popen(
        [*command, str(SCRIPT), "1000000", "0"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert job.stdout is not None
    draw, begin = random.Random(0), time.monotonic()
    num_restarts, newest, seen, early, grown = 0, -1, 0, {}, []
    goal = draw.randrange(2, 12)
    for line in job.stdout:
        found = _LOSS.match(line)
        seen = seen + 1 if found and int(found[1]) > newest else seen
        if seen < goal or not found:
            continue
        newest, seen, goal = int(found[1]), 0, draw.randrange(2, 12)
        (standby,) = [each for each in processes("elastic.standby") if parent_of(each) in children_of(job.pid)]
        ranks = children_of(standby)
        if not ranks:  # these lines are older than the kill before
            continue
        if num_restarts == options.restarts or time.monotonic() - begin > options.seconds:
            (folder / "stop").write_text("0")
            seen = -1 << 60
            continue
        keeper = parent_of(standby)
        now = {"manager": held(job.pid), "keeper": held(keeper), "standby": held(standby), "files": num_files(standby)}
        if num_restarts % options.every == 0:
            words = ", ".join(f"{name} {value}" for name, value in now.items())
            print(f"{num_restarts:5} restarts, {time.monotonic() - begin:7.1f} s, step {newest}: {words}", flush=True)
        early = now if num_restarts == _EARLY else early
        grown = differences(early, now)
        with suppress(ProcessLookupError):
            os.kill(draw.choice(ranks), signal.SIGKILL)
            num_restarts += 1
    status = job.wait()
    print(f"{num_restarts} restarts in {time.monotonic() - begin:.0f} s, status {status}; grown: {grown or 'nothing'}")
    return int(bool(grown) or status != 0)


def children_of(process: int) -> list[int]:
    """Returns the children of a process."""
    return [int(word) for task in Path(f"/proc/{process}/task").glob("*/children") for word in task.read_text().split()]


def parent_of(process: int) -> int:
    """Returns the parent of a process; 0: it has gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def differences(early: dict[str, object], now: dict[str, object]) -> list[str]:
    """Says what there is clearly more of than early on."""
    found = []
    for name, before in early.items():
        limits = (SLACK_FILES, SLACK_FILES, SLACK_BYTES)
        pairs = zip(before, now[name], limits, strict=True) if isinstance(before, tuple) else [(before, now[name], 40)]
        found += [f"{name}: {value} after {first}" for first, value, most in pairs if value > first + most]
    return found


if __name__ == "__main__":
    sys.exit(main())
