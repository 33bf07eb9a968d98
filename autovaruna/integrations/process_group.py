"""Defines `init_process_group`: the ranks of any launcher as the default group of torch.distributed."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autovaruna.errors import ConfigError
from autovaruna.ranks.environment import get_world
from autovaruna.ranks.torch_channel import lacking_for_nccl, open_store
from autovaruna.ranks.world import World

BACKENDS = ("auto", "gloo", "nccl")
_WHAT = "init_process_group"
_stores: Any = dist

logger = logging.getLogger(__name__)


def init_process_group(backend: str = "auto", timeout: timedelta | None = None) -> None:
    """Makes the ranks of this job the default group of torch.distributed, under every launcher. Collective.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set where they are missing. A group
    that is there already, by an earlier call or by the script itself, stays as it is. Call it before a library asks
    who takes part (`Accelerator()`, `TrainingArguments(...)`, `DistributedSampler(dataset)`).

    Args:
        backend: ``gloo``, ``nccl``, or ``auto``: both where each rank has a GPU of its own, else gloo.
        timeout: How long a collective of the group may last; None: torch's own limit.

    Raises:
        ConfigError: the backend is unknown or cannot be used here, or a group of other ranks is there already.
        RankError: another rank has ended.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"init_process_group: got backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    world = get_world()
    if dist.is_initialized():
        _check_same_ranks(world)
        _set_variables(world, {})
        return
    chosen = _choose(backend, world)
    store, place = _open_store(world)
    _set_variables(world, place)
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(chosen, store=store, rank=world.rank, world_size=world.num_ranks, **limit)
    logger.info("torch.distributed has a default group of %d ranks: %s", world.num_ranks, chosen)


def _check_same_ranks(world: World) -> None:
    got = dist.get_rank(), dist.get_world_size()
    if got != (world.rank, world.num_ranks):
        raise ConfigError(
            f"torch.distributed has a default group already, in which this is rank {got[0]} of {got[1]}; expected rank "
            f"{world.rank} of {world.num_ranks}, as the launcher started them. Leave the script's own "
            "torch.distributed.init_process_group() out, and call autovaruna.init_process_group() in its place."
        )


def _choose(backend: str, world: World) -> str:
    """Returns the backends for CPU and GPU tensors that torch is to open. Collective."""
    if backend == "gloo":
        return "gloo"
    has_gpu = torch.cuda.is_available() and local_rank(world) < torch.cuda.device_count()
    device = torch.device("cuda", local_rank(world)) if has_gpu else torch.device("cpu")
    lacking = lacking_for_nccl(world, device)
    if backend == "nccl" and lacking:
        raise ConfigError(f"init_process_group('nccl') needs a GPU for each rank: {'; '.join(lacking)}. Pass 'gloo'.")
    if lacking:
        return "gloo"
    torch.cuda.set_device(device)
    return "cpu:gloo,cuda:nccl"


def local_rank(world: World) -> int:
    """Returns the number of this rank among those of its host."""
    return world.hosts[: world.rank].count(world.hosts[world.rank])


def _open_store(world: World) -> tuple[Any, dict[str, str]]:
    """Opens a store of all ranks; returns this rank's connection to it, and the variables that name it. Collective."""
    if world.num_ranks == 1:
        return _stores.HashStore(), {}
    opened = open_store(world, _WHAT)
    return opened.store, {"MASTER_ADDR": opened.address, "MASTER_PORT": str(opened.port)}


def _set_variables(world: World, place: dict[str, str]) -> None:
    """Sets what launchers of torch.distributed set, where it is missing."""
    own = {
        "RANK": world.rank,
        "WORLD_SIZE": world.num_ranks,
        "LOCAL_RANK": local_rank(world),
        "LOCAL_WORLD_SIZE": world.hosts.count(world.hosts[world.rank]),
    }
    if world.num_ranks > 1 and not torch.cuda.is_available():
        place = {**place, "ACCELERATE_USE_CPU": "true"}
    for name, value in {**{name: str(number) for name, number in own.items()}, **place}.items():
        os.environ.setdefault(name, value)
