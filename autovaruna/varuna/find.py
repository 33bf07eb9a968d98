"""Finds the grid of a model for the ranks at hand, where the user has not said it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from autovaruna.config import resolve
from autovaruna.parallel.machine import describe_cluster
from autovaruna.parallel.own_device import find_device
from autovaruna.profiler.environment import cache_of
from autovaruna.profiler.profile import to_profile
from autovaruna.runtime.worlds.on_all import on_all
from autovaruna.runtime.worlds.world import World
from autovaruna.varuna.batches import Inputs
from autovaruna.varuna.grids import Measured, Wishes, choices
from autovaruna.varuna.measuring import read_costs, subject_of
from autovaruna.varuna.parts import keys_of
from autovaruna.varuna.stage_map import Grid, grid_of

logger = logging.getLogger(__name__)


def find_grid(
    model: nn.Module,
    sample: Inputs,
    batch_size: int,
    chunk_size: int | None,
    settings: Mapping[str, Any],
    world: World,
) -> tuple[Grid, int | None]:
    """Returns the ranks of each stage and the micro-batch size of the fastest plan. Collective.

    Args:
        model: The model, in the mode and precision that it will be trained in.
        sample: A batch of all samples of a step.
        batch_size: Their number.
        chunk_size: Samples of a micro-batch, if the user has said them.
        settings: As for `AutoVaruna`, without the map.
        world: The ranks.

    Raises:
        PlanError: no grid fits.
    """
    if world.num_ranks == 1:
        return grid_of(1, 1), chunk_size
    known = resolve({**settings, "inputs": "replicated"})
    device = find_device(model, known)
    subject = subject_of(model, sample, device, known, world)
    sizes = [chunk_size] if chunk_size else sorted({1, max(1, batch_size // world.num_ranks), max(1, batch_size // 4)})
    cache = cache_of(known, device, world.hosts.count(world.hosts[world.rank]))
    costs = read_costs(world, [cache] if cache else [], keys_of(subject.traced, sizes))
    for size in sizes:
        fresh = subject.measure([size], costs)
        costs |= fresh
        if cache and world.rank == 0:
            cache.write(fresh)
    cluster = describe_cluster(subject.watch, subject.traced.graph, known)
    measured = Measured(subject.traced.graph, to_profile(subject.traced, costs, device), cluster)
    wishes = Wishes(
        batch_size,
        chunk_size=chunk_size or 0,
        cutpoints=known.cutpoints,
        optimizer_bytes_factor=2.0 if known.optimizer_bytes_factor == "auto" else float(known.optimizer_bytes_factor),
        uses_all_ranks=True,
    )
    found = on_all(world, lambda: choices(measured, wishes) if world.rank == 0 else [], "finding stages and replicas")
    best = world.broadcast_object(found[0] if found else None, 0, "sharing stages and replicas")
    logger.info(
        "found %d stages of %d replicas, micro-batches of %d samples: %.6g s a step",
        best.num_stages,
        best.num_replicas,
        best.micro_batch_size,
        best.seconds,
    )
    return best.grid, best.micro_batch_size
