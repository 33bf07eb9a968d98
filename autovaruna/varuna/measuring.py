"""Measures a model and the links between ranks, all ranks together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autovaruna.config import Settings
from autovaruna.graph.call import describe
from autovaruna.graph.traced import TracedModel, trace
from autovaruna.parallel.machine import describe_cluster
from autovaruna.parallel.measuring import Turn, measure_together
from autovaruna.parallel.speeds import SpeedWatch
from autovaruna.profiler.cache import ProfileCache
from autovaruna.profiler.measure import Key, PartCost, measure, merge
from autovaruna.profiler.records import Cluster
from autovaruna.runtime.on_all import on_all
from autovaruna.runtime.world import World
from autovaruna.varuna.batches import Inputs


@dataclass(frozen=True)
class Subject:
    """A model that is measured by all ranks.

    Attributes:
        model: The model.
        traced: Its graph.
        tensors: Tensors of a sample call.
        device: Where this rank computes.
        settings: The settings.
        world: The ranks.
    """

    model: nn.Module
    traced: TracedModel
    tensors: Sequence[Tensor]
    device: torch.device
    settings: Settings
    world: World

    def measure(self, size: int, known: Collection[Key]) -> dict[Key, PartCost]:
        """Measures what is not known at one micro-batch size, each rank its share. Collective."""

        def own_share(turn: Turn) -> dict[Key, PartCost]:
            return measure(
                self.traced,
                self.model,
                [size],
                self.device,
                iterations=turn.iterations,
                budget_seconds=turn.budget_seconds,
                splits=False,
                share=turn.share,
                known=known,
                inputs=self.tensors,
            )

        return measure_together(SpeedWatch(self.world, self.device), self.settings.profile_iterations, own_share)

    def cluster(self) -> Cluster:
        """Measures links and speeds. Collective."""
        return describe_cluster(SpeedWatch(self.world, self.device), self.device, self.settings)


def subject_of(model: nn.Module, inputs: Inputs, device: torch.device, settings: Settings, world: World) -> Subject:
    """Traces a sample call of a model, as it will be trained. Collective."""

    def act() -> Subject:
        tensors, call = describe(model, (), inputs, settings.batch_inputs)
        traced = trace(model, call, device, loss_mode=settings.loss_mode)
        return Subject(model, traced, tensors, device, settings, world)

    return on_all(world, act, "tracing")


def read_costs(world: World, caches: Sequence[ProfileCache], keys: Collection[Key]) -> dict[Key, PartCost]:
    """Returns what rank 0 finds on disk, on every rank. Collective."""
    found = merge([cache.read(keys) for cache in caches]) if world.rank == 0 else {}
    costs: dict[Key, PartCost] = world.broadcast_object(found, 0, "reading saved measurements")
    return costs
