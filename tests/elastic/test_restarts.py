"""When a job is started again, and when it is given up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autovaruna.elastic.keeper import processes_with
from autovaruna.elastic.manager import Restarts
from autovaruna.elastic.run import Outcome
from tests.mpi.launch import QUIET, ROOT, find_mpirun

KILLED, FAILED = Outcome("rank 1 was ended by SIGKILL"), Outcome("rank 1 ended with status 3", error=3)


@pytest.mark.parametrize(
    ("most", "runs", "why"),
    [
        (100, [(FAILED, 7)] * 4, "3 runs failed and came no further"),
        (100, [(FAILED, step) for step in range(50)], ""),
        (100, [(KILLED, 7)] * 20, ""),
        (100, [(each, 7) for each in (KILLED, FAILED, KILLED, FAILED, KILLED, FAILED)], "3 runs failed"),
        (4, [(KILLED, step) for step in range(5)], "5 starts again within an hour"),
    ],
    ids=["fails at one step", "comes further", "is killed", "is killed and fails", "ends too often"],
)
def test_a_job_is_given_up_if_its_script_fails_in_vain_or_it_ends_too_often(
    most: int, runs: list[tuple[Outcome, int]], why: str
) -> None:
    """Faults during recoveries are not the script's."""
    restarts = Restarts(most)
    *earlier, last = [restarts.note(outcome, step) for outcome, step in runs]
    assert not any(earlier) and last.startswith(why) and bool(last) == bool(why)


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Returns what came of a job of two ranks that may be started again three times."""
    find_mpirun()
    (folder / "train.py").write_text(f"import os, subprocess, sys, time\nfrom mpi4py import MPI\n{script}\n")
    call = [sys.executable, "-m", "autovaruna", "run", "--no_standby", "--ranks_per_host", "2", "--max_restarts", "3"]
    variables = {**os.environ, **QUIET, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*call, "train.py"], cwd=folder, env=variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("MPI.COMM_WORLD.rank == 1 and os._exit(0)\ntime.sleep(60)", 1, "rank 1 ended with status 0 before the others"),
        ("sys.exit(75)", 75, "ended with status 75: status 75"),
    ],
    ids=["too early", "as if a signal had come"],
)
def test_a_script_that_ends_by_itself_before_any_step_is_not_started_again(
    tmp_path: Path, script: str, status: int, words: str
) -> None:
    done = run(tmp_path, script)
    assert done.returncode == status and words in done.stderr and "started again" not in done.stderr, done.stderr


def test_a_job_has_finished_when_its_ranks_have_whatever_they_leave_running(tmp_path: Path) -> None:
    """Once, mpirun waited for the output of what ranks had started, and the manager for mpirun."""
    words = f"import time; time.sleep(600)  # {tmp_path}"
    done = run(tmp_path, f"subprocess.Popen([sys.executable, '-c', {words!r}], start_new_session=True)")
    assert done.returncode == 0 and "the job has finished" in done.stderr, done.stderr
    assert not processes_with(words.encode())
