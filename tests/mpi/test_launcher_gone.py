"""Holds what is left of a job whose launcher was killed: no process after a second, no file after the next start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autovaruna.runtime.launcher import remove_leftovers
from tests.mpi.launch import QUIET, find_mpirun, kill_session
from tests.mpi.test_failures import is_running

SCRIPT = """
import os, time
from autovaruna import barrier
barrier()
os.write(1, b"up %d\\n" % os.getpid())
time.sleep(60)
"""
ENDS_WITHIN_SECONDS = 1.0
OTHERS = "sm_segment.of-another-host.0.cc.0"


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_ranks_end_with_their_launcher(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    start = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable]
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMI"))}
    process = subprocess.Popen(
        [*start, str(tmp_path / "job.py")], env={**env, **QUIET}, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ranks = [int(line.split()[1]) for line in (process.stdout.readline(), process.stdout.readline())]
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        while any(map(is_running, ranks)):
            assert time.monotonic() < deadline, ranks
            time.sleep(0.02)
    finally:
        kill_session(process.pid)
        process.wait()


def test_what_dead_jobs_left_is_removed(tmp_path: Path) -> None:
    """Of this user and host alone; what a living job has stays, and what is young may be of one that starts."""
    temporary, shared, processes = (tmp_path / name for name in ("tmp", "shm", "proc"))
    (processes / "71").mkdir(parents=True)
    prefix = f"sm_segment.{socket.gethostname()}.{os.getuid()}"
    (processes / "71" / "maps").write_text(f"7f00-7f01 rw-s 0 00:01 12 /dev/shm/{prefix}.aa.0\n")
    for name, host in (("ompi.70", ""), ("ompi.71", ""), ("ompi.72", "of-another-host"), ("ompi.x", "")):
        folder = temporary / name
        (folder / "0").mkdir(parents=True)
        (folder / f"pmix.{host or socket.gethostname()}.tool").write_text("")
    (temporary / "ompi.73").symlink_to(processes)
    shared.mkdir()
    for name in (f"{prefix}.aa.0", f"{prefix}.bb.0", OTHERS):
        (shared / name).write_text("")
    remove_leftovers(temporary, shared, processes)
    assert (temporary / "ompi.70").exists()  # it is young
    for path in (*temporary.glob("ompi.7[012]"), temporary / "ompi.x", *shared.iterdir()):
        os.utime(path, (1.0, 1.0))
    remove_leftovers(temporary, shared, processes)
    assert sorted(path.name for path in temporary.iterdir()) == ["ompi.71", "ompi.72", "ompi.73", "ompi.x"]
    assert sorted(path.name for path in shared.iterdir()) == sorted([f"{prefix}.aa.0", OTHERS])
    assert processes.exists()
