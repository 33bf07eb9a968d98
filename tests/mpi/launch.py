"""Starts programs and functions on several ranks, for tests; never leaves a process behind.

As a program (``python -m tests.mpi.launch folder process``) it is one rank of `run_on_ranks`.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autovaruna.errors import ConfigError
from autovaruna.ranks.environment import get_world
from tests.collector import look_for_a_moment, spare_collector

if TYPE_CHECKING:
    from tests.mpi.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


MOST_SECONDS = 300.0
POLL_SECONDS = 0.01
LONGEST_POLL_SECONDS = 0.2
"""Ranks that wait for long look less and less often: there may be many of them."""


def find_mpirun() -> str:
    """Returns the mpirun beside this Python, else that of PATH; skips the test without one, or without mpi4py."""
    import pytest  # not at the top: the ranks do not need it

    from autovaruna.elastic import job

    if os.environ.get("OMPI_COMM_WORLD_SIZE"):
        pytest.skip("runs under mpirun already, and cannot start another")
    pytest.importorskip("mpi4py")
    try:
        return job.find_mpirun()
    except ConfigError as error:
        pytest.skip(str(error))


def mpirun(
    num_ranks: int, target: str | Path, *args: object, env: dict[str, str] | None = None, check: bool = True,
    is_warm: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs a module or a script on several ranks, from the root of the repository; warm ones are forked (`warm`)."""
    command = mpirun_command(num_ranks, target, *args, is_warm=is_warm)
    done = run_group(command, MOST_SECONDS, {**os.environ, **QUIET, **(env or {})})
    if check and done.returncode != 0:
        raise AssertionError(f"status {done.returncode} of {target} on {num_ranks} ranks\n{done.stdout}\n{done.stderr}")
    return done


def mpirun_command(num_ranks: int, target: str | Path, *args: object, is_warm: bool = False) -> list[str]:
    """Returns the command that starts a module or a script on several ranks."""
    command = [find_mpirun(), "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none"]
    script = [str(target)] if str(target).endswith(".py") else ["-m", str(target)]
    start = warm().words(str(target)) if is_warm else [sys.executable, *script]
    return [*command, *start, *map(str, args)]


def mixed_command(num_ranks: int, module: str, *args: object) -> list[str]:
    """Returns the command that starts a module on ranks that are forked, but for rank 1.

    That one has a seed of hashes of its own, and imports and traces by itself: where either counts, ranks differ.
    """
    forked, own = warm().words(module), [sys.executable, "-m", module]
    command = [find_mpirun(), "--oversubscribe", "--bind-to", "none"]
    for first, count, start in ((0, 1, forked), (1, 1, own), (2, num_ranks - 2, forked)):
        if count > 0 and first < num_ranks:
            command += [":"] * (first > 0) + ["-n", str(count), *start, *map(str, args)]
    return command


@cache
def warm() -> Warm:
    """Returns the process that ranks are forked from, which starts with the first of them."""
    from tests.mpi.warm import Warm

    return Warm()


def run_group(
    command: list[str], timeout: float, env: dict[str, str], folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process group of its own, which is killed on timeout."""
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        out, err = process.communicate()
        raise AssertionError(f"took longer than {timeout} s: {' '.join(command)}\n{out}\n{err}") from None
    except BaseException:
        kill_session(process.pid)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def read_until(process: subprocess.Popen[str], words: str, count: int = 1) -> str:
    """Returns what a process prints up to the line with some words, for the count-th time."""
    text = ""
    for line in process.stdout or ():
        text += line
        count -= words in line
        if not count:
            return text
    raise AssertionError(f"{words!r} did not come:\n{text}")


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


@dataclass
class Ranks:
    """Several ranks, started once, that run one function after another: what a rank imports and traces stays there."""

    num_ranks: int
    start: Callable[..., list[str]] = mixed_command
    num_calls: int = 0

    def __post_init__(self) -> None:
        self._place = tempfile.TemporaryDirectory()
        self._folder = Path(self._place.name)
        command = self.start(self.num_ranks, "tests.mpi.launch", self._folder, os.getpid())
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **QUIET}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def call(self, target: str, args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Has each rank run a function; returns the results by rank. If a rank fails, the test does, and all end."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        write_whole(self._folder / f"call{number}", pickle.dumps((target, args, own_variables())))
        results = [self._folder / f"result{number}.{rank}" for rank in range(self.num_ranks)]
        until = time.monotonic() + timeout
        while not all(result.exists() for result in results):
            if (status := self._process.poll()) is not None or time.monotonic() > until:
                text = (self._folder / "log").read_text()
                self.kill()
                why = f"took longer than {timeout} s" if status is None else f"status {status}"
                raise AssertionError(f"{target} on {self.num_ranks} ranks: {why}\n{text}")
            time.sleep(POLL_SECONDS)
        return [pickle.loads(result.read_bytes()) for result in results]

    def let_go(self) -> None:
        """Lets the ranks come to the end of their script."""
        write_whole(self._folder / f"call{self.num_calls}", pickle.dumps(None))

    def end(self, timeout: float = 120) -> None:
        """Waits for the end of their script, which must be a good one."""
        try:
            status = self._process.wait(timeout)
            assert status == 0, f"status {status} of {self.num_ranks} ranks\n{(self._folder / 'log').read_text()}"
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the ranks, however they are."""
        if kept.get(self.num_ranks) is self:
            del kept[self.num_ranks]
        kill_session(self._process.pid)
        self._process.wait()
        self._place.cleanup()


kept: dict[int, Ranks] = {}
"""The ranks that wait for their next function, by their number."""


def end_kept_ranks() -> None:
    """Ends all ranks that wait, and what further ones would be forked from."""
    for ranks in kept.values():
        ranks.let_go()
    for ranks in list(kept.values()):
        ranks.end()
    if warm.cache_info().currsize:
        warm().end()
        warm.cache_clear()


def run_on_ranks(num_ranks: int, target: str, *args: Any, timeout: float = 300) -> list[Any]:
    """Runs ``module:function`` with picklable arguments on several ranks, which stay; returns their results by rank."""
    ranks = kept.get(num_ranks) or kept.setdefault(num_ranks, Ranks(num_ranks))
    return ranks.call(target, args, timeout)


def run_on_forks(num_ranks: int, target: str, *args: Any, timeout: float = 300) -> list[Any]:
    """Does so on ranks of their own, all forked from a process that has imported the module with its libraries."""
    warm().prepare("importlib:import_module", target.partition(":")[0])
    forks = Ranks(num_ranks, partial(mpirun_command, is_warm=True))
    results = forks.call(target, args, timeout)
    forks.let_go()
    forks.end()
    return results


def own_variables() -> dict[str, str]:
    """Returns the variables that a test may have set."""
    return {name: value for name, value in os.environ.items() if name.startswith("AUTOVARUNA_")}


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.rename(path)


def be_rank(folder: Path, parent: int) -> None:
    """Runs functions as one rank, and writes their results, until there is nobody who asks for more."""
    look_for_a_moment()
    rank, threads = get_world().rank, torch.get_num_threads()
    for number in itertools.count():
        call = wait_for(folder / f"call{number}", parent)
        if call is None:
            return gc.freeze()  # else the interpreter goes over all of it before it ends
        target, args, variables = call
        for name in own_variables():
            del os.environ[name]
        os.environ.update(variables)
        module, _, function = target.partition(":")
        run = getattr(importlib.import_module(module), function)
        spare_collector() if number == 0 else gc.collect()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        result = run(*args)
        write_whole(folder / f"result{number}.{rank}", pickle.dumps(result))


def wait_for(path: Path, parent: int) -> Any:
    """Returns the content of a file as soon as it is there; None if its writer has ended."""
    began = time.monotonic()
    while not path.exists():
        if session_of(parent) < 0:
            return None
        time.sleep(min(max(POLL_SECONDS, (time.monotonic() - began) / 10), LONGEST_POLL_SECONDS))
    return pickle.loads(path.read_bytes())


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), int(sys.argv[2]))
