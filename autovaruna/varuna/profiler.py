"""Defines `Profiler`: measures a model and the links into a folder that `AutoConfig` reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autovaruna.config.kinds import at_home, whole_number
from autovaruna.config.resolve import resolve
from autovaruna.errors import InputError, MeasureError, OrderError
from autovaruna.graph.records import Graph
from autovaruna.profiler.cache import ProfileCache, cache_of, environment
from autovaruna.profiler.files import load_measured, load_profile, save_measured
from autovaruna.profiler.measure import Key, PartCost
from autovaruna.profiler.profile import to_profile
from autovaruna.profiler.records import Cluster, Profile
from autovaruna.runtime.collective import on_all
from autovaruna.runtime.environment import get_world
from autovaruna.session.machine import describe_cluster, optimizer_factor
from autovaruna.session.measuring import Subject
from autovaruna.session.session import as_in_training
from autovaruna.varuna.batches import GetBatch, sample_batch
from autovaruna.varuna.grids import Measured
from autovaruna.varuna.measure import keys_between, keys_of, read_costs, subject_of
from autovaruna.varuna.place import device_of, local_rank_of


@dataclass(frozen=True)
class Facts:
    """What a profile says besides graph, costs and cluster.

    Attributes:
        gpus_per_node: ranks on a host.
        optimizer_bytes_factor: bytes of optimizer state for each byte of a trained parameter.
    """

    gpus_per_node: int
    optimizer_bytes_factor: float


class ProfileFolder:
    """A folder with a profile.

    Args:
        path: Where it is; made when something is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(at_home(path))
        self.measurements = self.path / "measurements"

    def write(self, graph: Graph, cluster: Cluster, facts: Facts) -> None:
        """Writes all but the costs.

        Raises:
            MeasureError: it cannot be written.
        """
        for name, record in (("graph", graph), ("cluster", cluster), ("facts", facts)):
            save_measured(self._file(name), record)

    def write_costs(self, profile: Profile) -> None:
        """Writes the costs.

        Raises:
            MeasureError: they cannot be written.
        """
        save_measured(self._file("profile"), profile)

    def read(self) -> tuple[Measured, Facts]:
        """Reads everything.

        Raises:
            MeasureError: a file is missing or damaged, or they do not belong together; says which.
        """
        profile = load_profile(self._file("profile"))
        graph = load_measured(self._file("graph"), Graph)
        cluster = load_measured(self._file("cluster"), Cluster)
        facts = load_measured(self._file("facts"), Facts)
        if profile.fingerprint != graph.fingerprint:
            raise MeasureError(
                f"the profile in {self.path} is of several models: the costs are of graph {profile.fingerprint}, the "
                f"graph is {graph.fingerprint}; measure again into an empty folder"
            )
        return Measured(graph, profile, cluster), facts

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"


logger = logging.getLogger(__name__)


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
        out_folder: Where the profile is written.
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
            self.folder.measurements, environment(self.device, on_host, splits=False), self.settings.profile_iterations
        )
        self._others = cache_of(self.settings, self.device, on_host)
        self._optimizer: torch.optim.Optimizer | None = None
        self._subject: Subject | None = None
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
        """Measures and writes the folder. Collective.

        Args:
            microbatches_to_profile: Micro-batch sizes.

        Returns:
            The costs of all blocks; None if parts are still to be measured.

        Raises:
            InputError: there is no size, or one below 1.
            MeasureError: a part cannot be run, or the folder cannot be written.
        """
        if self._subject is None:
            raise OrderError("profile_all() comes after initialize().")
        if not isinstance(microbatches_to_profile, Iterable):
            raise InputError(f"microbatches_to_profile is {microbatches_to_profile!r}; expected several, as [1, 2, 4].")
        sizes = sorted({whole_number("a micro-batch size", size) for size in microbatches_to_profile})
        if not sizes:
            raise InputError("microbatches_to_profile is empty; expected at least one micro-batch size.")
        traced = self._subject.traced
        cluster = describe_cluster(self._subject.watch, traced.graph, self.settings)
        facts = Facts(self.gpus_per_node, self._optimizer_factor())
        self._on_first(lambda: self.folder.write(traced.graph, cluster, facts))
        costs = read_costs(self.world, self._caches, keys_of(traced, sizes))
        for size in sizes:
            costs |= self._measure(size, costs)
        wanted = set(keys_of(traced, sizes))
        if not wanted <= costs.keys():
            logger.info("%d of %d measurements are still to be made", len(wanted - costs.keys()), len(wanted))
            return None
        profile = to_profile(traced, {key: costs[key] for key in wanted}, self.device)
        self._on_first(lambda: self.folder.write_costs(profile))
        return profile

    def _measure(self, size: int, known: dict[Key, PartCost]) -> dict[Key, PartCost]:
        """Measures one size, and saves what is new. Collective."""
        assert self._subject is not None
        skipped = set(keys_of(self._subject.traced, [size]))
        skipped -= skipped if self._wanted is None else keys_between(self._subject.traced, [size], self._wanted)
        fresh = self._subject.measure([size], known.keys() | skipped)
        of_size = {key: cost for key, cost in {**known, **fresh}.items() if key[1] == size}
        self._on_first(lambda: self._save(of_size, fresh))
        return fresh

    def _save(self, of_size: dict[Key, PartCost], fresh: dict[Key, PartCost]) -> None:
        self._own.write(of_size)
        if self._others:
            self._others.write(fresh)

    def _optimizer_factor(self) -> float:
        if self._optimizer is None:
            return 2.0  # not known; AdamW's is as large as any
        return on_all(self.world, lambda: optimizer_factor(self._optimizer, self.settings), "trying the optimizer")

    def _on_first(self, act: Callable[[], None]) -> None:
        """Writes on rank 0; an error there is an error on all. Collective."""
        on_all(self.world, act if self.rank == 0 else _nothing, "writing the profile")


def _nothing() -> None:
    """Writes nothing."""
