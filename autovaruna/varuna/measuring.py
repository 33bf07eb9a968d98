"""Measures a model and the links between ranks, all ranks together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from autovaruna.config import Settings
from autovaruna.graph.call import describe
from autovaruna.graph.tracing import trace
from autovaruna.parallel.measuring import Subject
from autovaruna.parallel.speeds import SpeedWatch
from autovaruna.profiler.cache import ProfileCache
from autovaruna.profiler.measure import Key, PartCost, merge
from autovaruna.runtime.worlds.on_all import on_all
from autovaruna.runtime.worlds.world import World
from autovaruna.varuna.batches import Inputs


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
