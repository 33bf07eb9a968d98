"""Measures a model and the links on all ranks (`Profiler`), and finds from that how to use some (`AutoConfig`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autovaruna.config.files import Amount, Count, at_home
from autovaruna.config.settings import Settings, resolve, whole_number
from autovaruna.errors import InputError, MeasureError
from autovaruna.graph.call import describe
from autovaruna.graph.export.run import TraceOptions
from autovaruna.graph.records import Graph
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.cut_points import cut_point_blocks
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.profiler.cache import ProfileCache, cache_of, environment, load_measured, save_measured
from autovaruna.profiler.measure import Key, PartCost, merge, parts_by_key, to_profile
from autovaruna.profiler.records import Cluster, Profile
from autovaruna.profiler.work import all_parts
from autovaruna.ranks.environment import get_world
from autovaruna.ranks.world import World, gather_on_all, on_all, on_first
from autovaruna.session.measuring import MeasuredModel, SpeedWatch, describe_cluster, measured_profile, optimizer_factor
from autovaruna.session.model import find_device
from autovaruna.session.session import as_in_training
from autovaruna.varuna.grid import Grid, GridOption, choice_at, choices, device_of, grid_of, local_rank_of
from autovaruna.varuna.step import GetBatch, Inputs, sample_batch

logger = logging.getLogger(__name__)
_WRITING = "writing the profile"


def subject_of(
    model: nn.Module, inputs: Inputs, device: torch.device, settings: Settings, world: World
) -> MeasuredModel:
    """Traces a sample call of a model, as it will be trained. Collective."""

    def act() -> MeasuredModel:
        tensors, call = describe(model, (), inputs, settings.batch_inputs)
        traced = trace(model, call, device, TraceOptions(loss_mode=settings.loss_mode))
        return MeasuredModel(model, traced, tensors, settings, SpeedWatch(world, device))

    return on_all(world, act, "tracing")


def keys_between(traced: TracedModel, sizes: Sequence[int], wanted: Collection[int]) -> set[Key]:
    """Returns the measurements of parts p, from cut point p - 1 to cut point p; InputError if there is no such part."""
    starts = [0, *cut_point_blocks(traced.graph), len(traced.graph.blocks)]
    unknown = sorted(place for place in wanted if not 0 <= place < len(starts) - 1)
    if unknown:
        raise InputError(f"pstages_to_profile names {unknown[0]}; expected parts from 0 to {len(starts) - 2}.")
    blocks = {block for place in wanted for block in range(starts[place], starts[place + 1])}
    chosen = [part for part in all_parts(traced) if not part.blocks or any(b.index in blocks for b in part.blocks)]
    return {(part.signature, size) for size in sizes for part in chosen}


def find_grid(
    model: nn.Module, sample: Inputs, batch_size: int, chunk_size: int | None, settings: Mapping[str, Any], world: World
) -> tuple[Grid, int | None]:
    """Returns the fastest plan's ranks of each stage and micro-batch size; PlanError if none fits. Collective."""
    if world.num_ranks == 1:
        return grid_of(1, 1), chunk_size
    known = resolve({**settings, "inputs": "replicated"})
    device = find_device(model, known)
    subject = subject_of(model, sample, device, known, world)
    sizes = [chunk_size] if chunk_size else sorted({1, max(1, batch_size // world.num_ranks), max(1, batch_size // 4)})
    profile = measured_profile(subject, sizes)
    cluster = describe_cluster(subject.watch, subject.traced.graph, known)
    problem = Problem(
        subject.traced.graph,
        profile,
        cluster,
        batch_size,
        2.0 if known.optimizer_bytes_factor == "auto" else float(known.optimizer_bytes_factor),
        constraints=Constraints(cutpoints=known.cutpoints),
    )

    def search() -> GridOption | None:
        return choices(problem, chunk_size or 0, uses_all_ranks=True)[0] if world.rank == 0 else None

    best = gather_on_all(world, search, "finding stages and replicas")[0]
    assert best is not None
    text = "found %d stages of %d replicas, micro-batches of %d samples: %.6g s a step"
    logger.info(text, best.num_stages, best.num_replicas, best.micro_batch_size, best.seconds)
    return best.grid, best.micro_batch_size


@dataclass(frozen=True)
class Facts:
    """What a profile has besides graph, costs and cluster."""

    gpus_per_node: Count  # ranks on a host
    optimizer_bytes_factor: Amount  # bytes of optimizer state for each byte of a trained parameter


class ProfileFolder:
    """A folder with a profile."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(at_home(path))
        self.measurements = self.path / "measurements"

    def write(self, **records: Graph | Cluster | Facts | Profile) -> None:
        """Writes records: ``graph``, ``cluster`` and ``facts``, the costs as ``profile``; MeasureError if it cannot."""
        for name, record in records.items():
            save_measured(self._file(name), record)

    def read(self) -> tuple[Graph, Profile, Cluster, Facts]:
        """Reads everything; MeasureError if a file is missing or damaged, or they do not belong together."""
        profile = load_measured(self._file("profile"), Profile)
        graph = load_measured(self._file("graph"), Graph)
        cluster = load_measured(self._file("cluster"), Cluster)
        facts = load_measured(self._file("facts"), Facts)
        if profile.fingerprint != graph.fingerprint or len(profile.costs[0]) != len(graph.blocks):
            raise MeasureError(
                f"the profile in {self.path} is of several models: the costs are of graph {profile.fingerprint}, the "
                f"graph is {graph.fingerprint}; measure again into an empty folder"
            )
        return graph, profile, cluster, facts

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"


class Profiler:
    """Measures what each part of a model costs at some micro-batch sizes, and what messages cost.

    Every rank measures its share. What has been measured is on disk after every micro-batch size, so that a run that
    was stopped goes on with `add_to_existing`.

    Args:
        model: The model, on the CPU or on ``meta``.
        get_batch_fn: Returns a batch of ``get_batch_fn(size, device=...)`` samples as keyword arguments of the model.
        device: Number of a GPU, or a device as torch names it; -1: a GPU of this rank's own, without one the CPU.
        gpus_per_node: Ranks on a host, for plans of more hosts; None: as many as there are now.
        fp16: Whether the model will compute in float16 under ``torch.autocast``.
        pstages_to_profile: Numbers of the parts between cut points to measure; None: all.
        from_cache: Whether measurements of other runs on such a machine are used.
        add_to_existing: Whether those in `out_folder` are kept and added to.
    """

    def __init__(
        self,
        model: nn.Module,
        get_batch_fn: GetBatch,
        device: int | str | torch.device | None = -1,
        gpus_per_node: int | None = None,
        fp16: bool = False,
        out_folder: str | os.PathLike[str] = "profiles",
        pstages_to_profile: Sequence[int] | None = None,
        from_cache: bool = True,
        add_to_existing: bool = False,
    ) -> None:
        self.world = get_world()
        self.rank = self.world.rank
        self.model = model
        self.device = device_of(device, local_rank_of(self.world))
        self.fp16 = bool(fp16)
        on_host = self.world.hosts.count(self.world.hosts[self.rank])
        self.gpus_per_node = on_host if gpus_per_node is None else whole_number("gpus_per_node", gpus_per_node)
        self.folder = ProfileFolder(out_folder)
        self.settings = resolve({"device": str(self.device), "inputs": "replicated"})
        self._own = ProfileCache(
            self.folder.measurements, environment(self.device, on_host), self.settings.profile_iterations
        )
        self._others = cache_of(self.settings, self.device, on_host)
        self._optimizer: torch.optim.Optimizer | None = None
        self.initialize(get_batch_fn, pstages_to_profile, from_cache, add_to_existing)

    def initialize(
        self,
        get_batch_fn: GetBatch,
        pstages_to_profile: Sequence[int] | None = None,
        from_cache: bool = True,
        add_to_existing: bool = False,
    ) -> None:
        """Traces the model; the constructor has called it already. Collective; the arguments are the constructor's."""
        self._wanted = None if pstages_to_profile is None else list(pstages_to_profile)
        self._caches = [self._own] if add_to_existing else []
        self._caches += [self._others] if from_cache and self._others else []
        precision = torch.autocast(self.device.type, dtype=torch.float16) if self.fp16 else nullcontext()
        with as_in_training(self.model), precision:
            sample = on_all(
                self.world,
                lambda: sample_batch(get_batch_fn, self.model, 2, self.device),
                "taking a batch from get_batch_fn",
            )
            self._subject = subject_of(self.model, sample, self.device, self.settings, self.world)
        self.num_cutpoints = sum(mark.block > 0 for mark in self._subject.traced.graph.cut_marks)
        if self._wanted is not None:
            keys_between(self._subject.traced, [1], self._wanted)

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: float | str = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Registers the optimizer, whose state counts as memory; the scales cost nothing and are not read."""
        del loss_scale, init_loss_scale, min_loss_scale
        self._optimizer = optimizer

    def profile_all(self, microbatches_to_profile: Sequence[int]) -> Profile | None:
        """Measures and writes the folder; returns the costs of all blocks, None if some are still missing. Collective.

        Raises:
            InputError: there is no size, or one below 1.
            MeasureError: a part cannot be run, or the folder cannot be written.
        """
        if not isinstance(microbatches_to_profile, Iterable):
            raise InputError(f"microbatches_to_profile is {microbatches_to_profile!r}; expected several, as [1, 2, 4].")
        sizes = sorted({whole_number("a micro-batch size", size) for size in microbatches_to_profile})
        if not sizes:
            raise InputError("microbatches_to_profile is empty; expected at least one micro-batch size.")
        traced = self._subject.traced
        cluster = describe_cluster(self._subject.watch, traced.graph, self.settings)
        factor = 2.0  # not known; AdamW's is as large as any
        if self._optimizer is not None:
            factor = on_all(
                self.world, lambda: optimizer_factor(self._optimizer, self.settings), "trying the optimizer"
            )
        facts = Facts(self.gpus_per_node, factor)
        on_first(self.world, lambda: self.folder.write(graph=traced.graph, cluster=cluster, facts=facts), _WRITING)
        wanted = parts_by_key(traced, sizes)
        found = merge([cache.read(wanted) for cache in self._caches]) if self.rank == 0 else {}
        costs: dict[Key, PartCost] = self.world.broadcast_object(found, 0, "reading saved measurements")
        for size in sizes:
            costs |= self._measure(size, costs)
        if missing := wanted.keys() - costs.keys():
            logger.info("%d of %d measurements are still to be made", len(missing), len(wanted))
            return None
        profile = to_profile(traced, {key: costs[key] for key in wanted}, self.device)
        on_first(self.world, lambda: self.folder.write(profile=profile), _WRITING)
        return profile

    def _measure(self, size: int, known: dict[Key, PartCost]) -> dict[Key, PartCost]:
        """Measures one size, and saves what is new. Collective."""
        skipped = set(parts_by_key(self._subject.traced, [size]))
        skipped -= skipped if self._wanted is None else keys_between(self._subject.traced, [size], self._wanted)
        fresh = self._subject.measure([size], known.keys() | skipped)

        def save() -> None:
            self._own.write({key: cost for key, cost in {**known, **fresh}.items() if key[1] == size})
            if self._others:
                self._others.write(fresh)

        on_first(self.world, save, _WRITING)
        return fresh


class AutoConfig:
    """Finds how to use some ranks, from a profile that was measured on any number of them.

    Args:
        batch_size: Samples of a step, over all of them.
        profile_folder: What a `Profiler` wrote.
        gpus_per_node: Ranks on a host; None: as when it was measured.
        memory_bytes: Memory of a rank; None: what was measured.
        chunk_size: Samples of a micro-batch; 0: found.
        cutpoints: Where cuts may lie: ``only``, ``prefer`` or ``ignore`` the cut points.
        optimizer_bytes_factor: Bytes of optimizer state for each byte of a trained parameter; None: as measured.

    Raises:
        InputError: a number is not above zero.
        MeasureError: the profile is missing or damaged, or knows of no links.
    """

    def __init__(
        self,
        num_ranks: int,
        batch_size: int,
        profile_folder: str | os.PathLike[str],
        gpus_per_node: int | None = None,
        memory_bytes: float | None = None,
        chunk_size: int = 0,
        cutpoints: str = "only",
        optimizer_bytes_factor: float | None = None,
    ) -> None:
        num_ranks, batch_size = whole_number("num_ranks", num_ranks), whole_number("batch_size", batch_size)
        gpus_per_node = gpus_per_node and whole_number("gpus_per_node", gpus_per_node)
        chunk_size = chunk_size and whole_number("chunk_size", chunk_size)
        if memory_bytes is not None and not memory_bytes > 0:
            raise InputError(f"memory_bytes is {memory_bytes}; expected more than zero")
        graph, profile, known, facts = ProfileFolder(profile_folder).read()
        factor = facts.optimizer_bytes_factor if optimizer_bytes_factor is None else optimizer_bytes_factor
        self._chunk_size = chunk_size
        self._problem = Problem(
            graph,
            profile,
            cluster_for(known, num_ranks, gpus_per_node or facts.gpus_per_node, memory_bytes),
            batch_size,
            float(factor),
            constraints=Constraints(cutpoints=cutpoints),
        )

    @cached_property
    def choices(self) -> list[GridOption]:
        """The best plan of each number of stages that fits, the fastest first; PlanError if none does."""
        return choices(self._problem, self._chunk_size)

    @property
    def best(self) -> GridOption:
        """The fastest."""
        return self.choices[0]

    @property
    def batch_times(self) -> dict[int, float]:
        """Predicted seconds of a step by number of stages."""
        return {each.num_stages: each.seconds for each in self.choices}

    def get_min(self) -> tuple[int, int, float]:
        """Returns stages, micro-batch size and predicted seconds of the fastest."""
        return self.best.num_stages, self.best.micro_batch_size, self.best.seconds

    def info(self, stages: int, micro_batch_size: int = 0) -> GridOption:
        """Returns what some stages and micro-batch size would cost; PlanError if they do not fit."""
        size = whole_number("micro_batch_size", micro_batch_size) if micro_batch_size else self._chunk_size
        return choice_at(self._problem, whole_number("stages", stages), size)


def cluster_for(known: Cluster, num_ranks: int, gpus_per_node: int, memory_bytes: float | None) -> Cluster:
    """Returns a cluster of other ranks like those that were measured; MeasureError for links that were not measured."""
    hosts = tuple(f"host{rank // gpus_per_node}" for rank in range(num_ranks))
    if num_ranks > 1 and known.num_ranks == 1:
        raise MeasureError(
            f"the profile was measured on one rank, so that no link is known: got {num_ranks} ranks to plan for. Run "
            "the Profiler on two or more"
        )
    if len(set(hosts)) > 1 and len(set(known.hosts)) == 1:
        logger.warning("links between hosts were not measured: they are taken to be like those within one")
    typical = sorted(known.memory_bytes)[len(known.memory_bytes) // 2]
    is_same = num_ranks == known.num_ranks and len(set(hosts)) == len(set(known.hosts))
    memory = known.memory_bytes if is_same else (typical,) * num_ranks
    return replace(
        known,
        hosts=known.hosts if is_same else hosts,
        memory_bytes=memory if memory_bytes is None else (float(memory_bytes),) * num_ranks,
        speeds=known.speeds if is_same else (1.0,) * num_ranks,
        own_process_bytes=known.own_process_bytes if is_same else (),
    )
