"""Looks at what started this process: whether its ranks are all there, whether it still is, and what others left.

Open MPI ends a job whose rank ends after another one has called ``MPI_Init``, but not one whose rank ended before, with
status 0: so a rank looks for the others of its host just before that call. Ranks of torchrun look while they wait.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from autovaruna.errors import RankError
from autovaruna.ranks.system import process_file

_PATIENCE_SECONDS = 2.0
"""How long a rank may take to appear: a launcher starts all of a host at once."""
_STARTING_SECONDS = 60.0
"""What is younger may be of a job that starts just now."""
_LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orted", "hydra_pmi_proxy")
_OF_RANK = (
    *("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_PROCID", "SLURM_STEP_ID"),
    *("PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
)
"""The variables that say which rank of which job a process is: those of its child are the same."""
_at_fork: dict[str, str] | None = None


class Names(NamedTuple):
    """The variables by which a launcher says which job of the host this is, its rank, and how many ranks are here."""

    job: tuple[str, ...]
    rank: str
    num_here: str


OF_OPEN_MPI = Names(("PMIX_NAMESPACE",), "PMIX_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
OF_TORCHRUN = Names(("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"), "RANK", "LOCAL_WORLD_SIZE")


def expect_siblings(names: Names, variables: Mapping[str, str] = os.environ, processes: Path = Path("/proc")) -> None:
    """Returns at once if every rank of this host has a process, or if that cannot be known.

    Raises:
        RankError: ranks have ended.
    """
    job, num_here = [variables.get(name) for name in names.job], variables.get(names.num_here, "")
    is_seen = names is OF_TORCHRUN or launcher_of(os.getpid(), processes)
    if None in job or not num_here.isdigit() or not is_seen:
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (num_alive := len(_ranks_of(job, names, processes))) < int(num_here):
        if time.monotonic() > deadline:
            raise RankError(
                f"{int(num_here) - num_alive} of the {num_here} ranks on this host ended their script before rank "
                f"{variables.get(names.rank, '?')} came to its first call. Every rank must make the same calls, the "
                "same number of times."
            )
        time.sleep(0.05)


def _ranks_of(job: Sequence[str | None], names: Names, processes: Path) -> set[str]:
    """Returns the ranks of a job that have a process here: itself, or one that it has started."""
    found = set()
    for process in [each for each in processes.iterdir() if each.name.isdigit()]:
        variables = _variables_of(process)
        if names.rank in variables and [variables.get(name) for name in names.job] == job:
            found.add(variables[names.rank])
    return found


def record_fork() -> None:
    """Keeps the variables that this process has from the one that it was forked from."""
    global _at_fork
    _at_fork = dict(os.environ)


def helps_a_rank(variables: Mapping[str, str], processes: Path = Path("/proc")) -> bool:
    """Whether a rank has started this process, by fork or by multiprocessing, and nobody has made it a rank since.

    A process that is spawned runs the script again before it knows its parent: the script then has another name.
    """
    before, main = _at_fork, sys.modules.get("__mp_main__")
    is_spawned = multiprocessing.parent_process() is not None or getattr(main, "__name__", "") == "__mp_main__"
    if before is None and is_spawned:
        before = _variables_of(processes / "self")
    return before is not None and all(before.get(name) == variables.get(name) for name in _OF_RANK)


def _variables_of(process: Path) -> dict[str, str]:
    """Returns the variables that a process was started with."""
    entries = (entry.partition("=") for entry in text_of(process / "environ").split("\0"))
    return {name: value for name, _, value in entries}


def launcher_of(process: int, processes: Path = Path("/proc")) -> int:
    """Returns the launcher that is seen above a process: then so are the ranks that it has started; 0: none is."""
    while process > 1:
        line, _, rest = text_of(processes / str(process) / "stat").rpartition(")")
        if line.partition("(")[2].startswith(_LAUNCHERS):
            return process
        process = int(rest.split()[1]) if rest else 0
    return 0


def end_with(process: int) -> None:
    """Ends this rank as soon as a process has ended, whatever it does; nothing where the system cannot tell.

    Ranks whose launcher was killed would go on for seconds, into the time of a job that follows.
    """

    def wait(file: int) -> None:
        select.select([file], [], [])
        os._exit(1)

    with suppress(OSError):
        if process > 1:
            waiting = process_file(process)
            threading.Thread(target=wait, args=(waiting,), name="autovaruna-launcher", daemon=True).start()


def remove_leftovers(
    temporary: Path | None = None,
    shared: Path = Path("/dev/shm"),
    processes: Path = Path("/proc"),
    least_seconds: float = _STARTING_SECONDS,
) -> None:
    """Removes what jobs of Open MPI left that this user killed on this host.

    Each mpirun has a folder in the temporary place of the system, ``ompi.`` and its number. Ranks have shared memory
    for messages, which is theirs as long as one of them maps it.
    """
    place, host = temporary or Path(tempfile.gettempdir()), socket.gethostname()
    for folder in own_and_old([*place.glob("ompi.*"), *place.glob("prted.*")], least_seconds):
        process = folder.name.rpartition(".")[2]
        is_of_this_host = next(folder.glob(f"pmix.{host}.tool*"), None) is not None
        if process.isdigit() and is_of_this_host and not _is_alive(processes / process):
            shutil.rmtree(folder, ignore_errors=True)
    segments = own_and_old(shared.glob(f"sm_segment.{host}.{os.getuid()}.*"), least_seconds)
    mapped = "".join(text_of(each / "maps") for each in processes.iterdir() if each.name.isdigit()) if segments else ""
    for segment in segments:
        if segment.name not in mapped:
            segment.unlink(missing_ok=True)


def text_of(file: Path) -> str:
    """Returns what the system shows of a process; nothing, if it has ended, or is somebody else's."""
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def _is_alive(process: Path) -> bool:
    """Says whether a process runs; one that has ended and waits to be noticed does not."""
    stat = text_of(process / "stat")
    return stat.rpartition(")")[2].split()[0] != "Z" if stat else process.exists()


def own_and_old(paths: Iterable[Path], least_seconds: float = _STARTING_SECONDS) -> list[Path]:
    """Returns those that belong to this user, are no links, and were not made just now."""
    found = []
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            is_old = abs(time.time() - status.st_mtime) > least_seconds  # also where the clock was set back since
            if status.st_uid == os.getuid() and is_old and not path.is_symlink():
                found.append(path)
    return found
