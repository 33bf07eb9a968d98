"""Measures a model and the links, all ranks together, and finds the grid where the user has not said it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autovaruna.config.resolve import resolve
from autovaruna.config.settings import Settings
from autovaruna.errors import InputError
from autovaruna.graph.call import describe
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.cut_points import cut_point_blocks
from autovaruna.profiler.cache import ProfileCache, cache_of
from autovaruna.profiler.measure import Key, PartCost, merge
from autovaruna.profiler.parts import Part, block_parts, layer_parts, repeated_part
from autovaruna.profiler.profile import to_profile
from autovaruna.runtime.collective import on_all
from autovaruna.runtime.world import World
from autovaruna.session.device import find_device
from autovaruna.session.machine import SpeedWatch, describe_cluster
from autovaruna.session.measuring import Subject
from autovaruna.varuna.batches import Inputs
from autovaruna.varuna.grids import Grid, Measured, Wishes, choices, grid_of


def subject_of(model: nn.Module, inputs: Inputs, device: torch.device, settings: Settings, world: World) -> Subject:
    """Traces a sample call of a model, as it will be trained. Collective."""

    def act() -> Subject:
        tensors, call = describe(model, (), inputs, settings.batch_inputs)
        traced = trace(model, call, device, loss_mode=settings.loss_mode)
        return Subject(model, traced, tensors, settings, SpeedWatch(world, device))

    return on_all(world, act, "tracing")


def read_costs(world: World, caches: Sequence[ProfileCache], keys: Collection[Key]) -> dict[Key, PartCost]:
    """Returns what rank 0 finds on disk, on every rank. Collective."""
    found = merge([cache.read(keys) for cache in caches]) if world.rank == 0 else {}
    costs: dict[Key, PartCost] = world.broadcast_object(found, 0, "reading saved measurements")
    return costs


def parts_of(traced: TracedModel) -> list[Part]:
    """Returns everything that is measured of a model."""
    return [part for part in (*block_parts(traced), *layer_parts(traced), repeated_part(traced)) if part.nodes]


def keys_of(traced: TracedModel, sizes: Sequence[int]) -> list[Key]:
    """Returns the measurements of a whole model."""
    return [(part.signature, size) for size in sizes for part in parts_of(traced)]


def keys_between(traced: TracedModel, sizes: Sequence[int], wanted: Collection[int]) -> set[Key]:
    """Returns the measurements of the parts with some numbers; part p lies between the cut points p - 1 and p.

    Raises:
        InputError: there is no such part.
    """
    starts = [0, *cut_point_blocks(traced.graph), len(traced.graph.blocks)]
    unknown = sorted(place for place in wanted if not 0 <= place < len(starts) - 1)
    if unknown:
        raise InputError(f"pstages_to_profile names {unknown[0]}; expected parts from 0 to {len(starts) - 2}.")
    blocks = {block for place in wanted for block in range(starts[place], starts[place + 1])}
    chosen = [part for part in parts_of(traced) if not part.blocks or any(b.index in blocks for b in part.blocks)]
    return {(part.signature, size) for size in sizes for part in chosen}


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
