"""Finds ranks that have ended before MPI started: the others would wait for them in ``MPI_Init`` for ever.

Open MPI ends a job whose rank ends after another one has called ``MPI_Init``, but not one whose rank ended before, with
status 0. So a rank looks for the others of its host just before that call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from autovaruna.errors import RankError

_JOB, _RANK, _NUM_HERE = "PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
_PATIENCE_SECONDS = 2.0
"""How long a rank may take to appear: a launcher starts all of a host at once."""
_LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orted")


def expect_siblings(variables: Mapping[str, str] = os.environ, processes: Path = Path("/proc")) -> None:
    """Returns at once if every rank of this host has a process, or if that cannot be known.

    Args:
        variables: The environment of this rank.
        processes: Where the system shows its processes.

    Raises:
        RankError: ranks have ended.
    """
    job, num_here = variables.get(_JOB, ""), variables.get(_NUM_HERE, "")
    if not job or not num_here.isdigit() or not _sees_launcher(processes):
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (num_alive := len(_ranks_of(job, processes))) < int(num_here):
        if time.monotonic() > deadline:
            raise RankError(
                f"{int(num_here) - num_alive} of the {num_here} ranks on this host ended their script before rank "
                f"{variables.get(_RANK, '?')} came to its first call. Every rank must make the same calls, the same "
                "number of times."
            )
        time.sleep(0.05)


def _ranks_of(job: str, processes: Path) -> set[str]:
    """Returns the ranks of a job that have a process here: itself, or one that it has started."""
    found = (_variables_of(each) for each in processes.iterdir() if each.name.isdigit())
    return {variables[_RANK] for variables in found if variables.get(_JOB) == job and _RANK in variables}


def _variables_of(process: Path) -> dict[str, str]:
    try:
        entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended, or is somebody else's
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def _sees_launcher(processes: Path) -> bool:
    """Says whether the launcher is seen above this process: then so are the ranks that it has started."""
    process, name = os.getpid(), ""
    while process > 1 and not name.startswith(_LAUNCHERS):
        try:
            line, _, rest = (processes / str(process) / "stat").read_text(errors="replace").rpartition(")")
        except OSError:
            return False
        process, name = int(rest.split()[1]), line.partition("(")[2]
    return name.startswith(_LAUNCHERS)
