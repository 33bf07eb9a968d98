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


def test_a_job_whose_script_fails_at_one_step_again_and_again_is_given_up() -> None:
    restarts = Restarts(100)
    assert [restarts.note(FAILED, 7) for _ in range(3)] == [""] * 3
    assert "3 runs failed and came no further" in restarts.note(FAILED, 7)


def test_one_that_comes_further_each_time_goes_on() -> None:
    restarts = Restarts(100)
    assert not any(restarts.note(FAILED, step) for step in range(50))


def test_faults_during_recoveries_do_not_end_a_job() -> None:
    restarts = Restarts(100)
    assert not any(restarts.note(KILLED, 7) for _ in range(20))
    assert not any(restarts.note(each, 7) for each in (FAILED, KILLED, FAILED, KILLED))
    assert restarts.note(FAILED, 7)


def test_whatever_ends_a_job_too_often_within_an_hour_ends_it_for_good() -> None:
    restarts = Restarts(4)
    assert [bool(restarts.note(KILLED, step)) for step in range(5)] == [False] * 4 + [True]


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
