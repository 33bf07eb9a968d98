"""Holds what ranks find out of their launcher: whether all are there that it has started, and whether it still is.

What is left of a job whose launcher was killed: no process after seconds, no file after the next start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from autovaruna.errors import RankError
from autovaruna.ranks import launcher
from tests.mpi.launch import QUIET, find_mpirun, kill_session, read_until
from tests.mpi.test_failures import is_running

SCRIPT = """
import os, time
from autovaruna import barrier
barrier()
os.write(1, b"up %d\\n" % os.getpid())
time.sleep(60)
"""
ENDS_WITHIN_SECONDS = 10.0
OTHERS = "sm_segment.of-another-host.0.cc.0"


@pytest.mark.parametrize("name", ["mpirun", "torchrun"])
def test_ranks_end_with_their_launcher(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    start = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable]
    if name == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMI"))}
    process = subprocess.Popen(
        [*start, str(tmp_path / "job.py")], env={**env, **QUIET}, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        ranks = [int(line.split()[1]) for line in read_until(process, "up ", 2).splitlines()]
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        while any(map(is_running, ranks)):
            assert time.monotonic() < deadline, ranks
            time.sleep(0.02)
    finally:
        kill_session(process.pid)
        process.wait()


@pytest.mark.parametrize("changed_at", [1.0, 1e11], ids=["long ago", "before the clock was set back"])
def test_what_dead_jobs_left_is_removed(tmp_path: Path, changed_at: float) -> None:
    """Of this user and host alone; what a living job has stays, and what is young may be of one that starts."""
    temporary, shared, processes = (tmp_path / name for name in ("tmp", "shm", "proc"))
    (processes / "71").mkdir(parents=True)
    prefix = f"sm_segment.{socket.gethostname()}.{os.getuid()}"
    (processes / "71" / "maps").write_text(f"7f00-7f01 rw-s 0 00:01 12 /dev/shm/{prefix}.aa.0\n")
    (processes / "74").mkdir()
    (processes / "74" / "stat").write_text("74 (prterun) Z 1 1")  # it has ended, and nobody has noticed yet
    names = [("ompi.70", ""), ("ompi.71", ""), ("ompi.72", "of-another-host"), ("ompi.74", ""), ("ompi.x", "")]
    for name, host in names:
        folder = temporary / name
        (folder / "0").mkdir(parents=True)
        (folder / f"pmix.{host or socket.gethostname()}.tool").write_text("")
    (temporary / "ompi.73").symlink_to(processes)
    shared.mkdir()
    for name in (f"{prefix}.aa.0", f"{prefix}.bb.0", OTHERS):
        (shared / name).write_text("")
    launcher.remove_leftovers(temporary, shared, processes)
    assert (temporary / "ompi.70").exists()  # it is young
    for path in (*temporary.glob("ompi.7[0124]"), temporary / "ompi.x", *shared.iterdir()):
        os.utime(path, (changed_at, changed_at))
    launcher.remove_leftovers(temporary, shared, processes)
    assert sorted(path.name for path in temporary.iterdir()) == ["ompi.71", "ompi.72", "ompi.73", "ompi.x"]
    assert sorted(path.name for path in shared.iterdir()) == sorted([f"{prefix}.aa.0", OTHERS])
    assert processes.exists()


JOB = {"PMIX_NAMESPACE": "job@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "0"}
LAUNCHER = 7


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns processes as the system shows them: a launcher, and this one below it."""
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 0.0)
    show(tmp_path, LAUNCHER, "prterun", 1, {})
    show(tmp_path, os.getpid(), "python (x)", LAUNCHER, JOB)
    return tmp_path


def show(processes: Path, number: int, name: str, parent: int, variables: dict[str, str]) -> None:
    folder = processes / str(number)
    folder.mkdir()
    (folder / "stat").write_text(f"{number} ({name}) S {parent} 0 0")
    (folder / "environ").write_text("\0".join(f"{name}={value}" for name, value in variables.items()))


@pytest.mark.parametrize("other", [{"PMIX_RANK": "1", "PMIX_NAMESPACE": "another@1"}, {"PMIX_RANK": "1"}])
def test_a_rank_that_is_gone_is_told(processes: Path, other: dict[str, str]) -> None:
    show(processes, 8, "python", LAUNCHER, JOB | other)
    is_gone = "PMIX_NAMESPACE" in other
    with pytest.raises(RankError, match="1 of the 2 ranks on this host ended") if is_gone else nullcontext():
        launcher.expect_siblings(launcher.OF_OPEN_MPI, JOB, processes)


def test_nothing_is_said_where_nothing_can_be_known(processes: Path, tmp_path: Path) -> None:
    """Another launcher, or one that is outside of this container, where other ranks may be, too."""
    launcher.expect_siblings(launcher.OF_OPEN_MPI, {}, processes)
    (processes / str(LAUNCHER) / "stat").write_text(f"{LAUNCHER} (sh) S 1 0 0")
    launcher.expect_siblings(launcher.OF_OPEN_MPI, JOB, processes)
    launcher.expect_siblings(launcher.OF_OPEN_MPI, JOB, tmp_path / "nowhere")


def test_ranks_of_torchrun_look_for_each_other(processes: Path) -> None:
    """Two jobs may have one name, but not one port."""
    job = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"}
    own = job | {"RANK": "0", "MASTER_PORT": "1"}
    show(processes, 8, "python", 1, own)
    show(processes, 9, "python", 1, job | {"RANK": "1", "MASTER_PORT": "2"})
    with pytest.raises(RankError, match="1 of the 2 ranks on this host ended"):
        launcher.expect_siblings(launcher.OF_TORCHRUN, own, processes)
    show(processes, 10, "python", 1, own | {"RANK": "1"})
    launcher.expect_siblings(launcher.OF_TORCHRUN, own, processes)
