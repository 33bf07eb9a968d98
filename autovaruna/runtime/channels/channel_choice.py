"""Chooses the way that tensors take between ranks, and opens it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set
from math import lcm

import torch
import torch.distributed as dist

from autovaruna.errors import ConfigError
from autovaruna.planner.records import Plan
from autovaruna.runtime.channels import links
from autovaruna.runtime.channels.channel import TorchChannel
from autovaruna.runtime.transport.base import Pair
from autovaruna.runtime.worlds.world import World

logger = logging.getLogger(__name__)

Ranks = tuple[int, ...]


def open_channel(setting: str, plan: Plan, world: World, device: torch.device) -> None:
    """Opens the channel of a plan. Collective.

    Args:
        setting: ``auto``, ``mpi``, ``nccl`` or ``gloo``.
        plan: Says who talks to whom.
        world: The ranks.
        device: Where this rank computes.

    Raises:
        ConfigError: NCCL is asked for where it cannot be; on every rank.
    """
    groups = {stage.ranks for stage in plan.stages if len(stage.ranks) > 1}
    backend = _open(setting, world, device, set(pairs_of(plan)), groups)
    if device.type != "cpu" and backend:
        logger.info("tensors go between ranks through %s", backend)


def open_to_measure(setting: str, world: World, device: torch.device) -> None:
    """Opens the channel for what is measured before there is a plan: neighbours talk, and all sum. Collective.

    Arguments and errors are those of `open_channel`.
    """
    neighbours = {pair for ends in links.pairs_of(world.hosts) for pair in (ends, ends[::-1])}
    _open(setting, world, device, neighbours, {tuple(range(world.num_ranks))})


def _open(setting: str, world: World, device: torch.device, pairs: Set[Pair], groups: Set[Ranks]) -> str:
    """Opens the channel for messages between pairs, and sums over groups; returns its name, empty if none is needed."""
    if world.num_ranks == 1:
        return ""
    lacking = [] if setting in ("mpi", "gloo") else lacking_for_nccl(world, device)
    if setting == "nccl" and lacking:
        raise ConfigError(f"channel='nccl' needs a GPU for each rank: {'; '.join(lacking)}. Pass channel='mpi'.")
    backend = ("mpi" if lacking else "nccl") if setting == "auto" else setting
    if backend != "mpi":
        carrier = world.carrier
        if not isinstance(carrier, TorchChannel) or not carrier.is_like(backend, device):
            carrier = world.carrier = TorchChannel(world, backend, device)
        carrier.connect(pairs, groups)
    elif setting == "auto":
        world.open_rings(pairs, device.type == "cpu")
    return backend


def lacking_for_nccl(world: World, device: torch.device) -> list[str]:
    """Returns in words why NCCL cannot connect the ranks; nothing if it can. Collective."""
    known = world.gather_objects((device.type, _identity(device), dist.is_nccl_available()), "choosing a channel")
    lacking = [f"rank {rank} computes on {kind}" for rank, (kind, _, _) in enumerate(known) if kind != "cuda"]
    lacking += [f"rank {rank}'s PyTorch has no NCCL" for rank, (_, _, has_nccl) in enumerate(known) if not has_nccl]
    first: dict[str, int] = {}
    for rank, (kind, identity, _) in enumerate(known):
        if kind == "cuda" and first.setdefault(identity, rank) != rank:
            lacking.append(f"ranks {first[identity]} and {rank} share a GPU")
    return lacking


def _identity(device: torch.device) -> str:
    """Returns a name of this device that no other device of any host has."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def pairs_of(plan: Plan) -> Iterator[Pair]:
    """Yields the ranks that a micro-batch takes from one stage to another, both ways."""
    for source in range(plan.num_stages):
        for destination in range(source + 1, plan.num_stages):
            period = lcm(len(plan.stages[source].ranks), len(plan.stages[destination].ranks))
            for micro_batch in range(min(period, plan.num_micro_batches)):
                ends = plan.rank_of(source, micro_batch), plan.rank_of(destination, micro_batch)
                if ends[0] != ends[1]:
                    yield ends
                    yield ends[::-1]
