"""Defines `AutoConfig`: which stages, replicas and micro-batches are fastest, from a saved profile."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import cached_property

from autovaruna.config.settings import whole_number
from autovaruna.errors import InputError, MeasureError
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.profiler.records import Cluster
from autovaruna.varuna.grid import Choice, choice_at, choices
from autovaruna.varuna.profiler import ProfileFolder

logger = logging.getLogger(__name__)


class AutoConfig:
    """Finds how to use some ranks, from a profile that was measured on any number of them.

    Args:
        num_ranks: Ranks to plan for.
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
    def choices(self) -> list[Choice]:
        """The best plan of each number of stages that fits, the fastest first.

        Raises:
            PlanError: none fits; says why for each.
        """
        return choices(self._problem, self._chunk_size)

    @property
    def best(self) -> Choice:
        """The fastest."""
        return self.choices[0]

    @property
    def batch_times(self) -> dict[int, float]:
        """Predicted seconds of a step by number of stages."""
        return {each.num_stages: each.seconds for each in self.choices}

    def get_min(self) -> tuple[int, int, float]:
        """Returns stages, micro-batch size and predicted seconds of the fastest.

        Raises:
            PlanError: none fits.
        """
        return self.best.num_stages, self.best.micro_batch_size, self.best.seconds

    def info(self, stages: int, micro_batch_size: int = 0) -> Choice:
        """Returns what some stages and micro-batch size would cost.

        Raises:
            PlanError: it does not fit; says what is missing.
        """
        size = whole_number("micro_batch_size", micro_batch_size) if micro_batch_size else self._chunk_size
        return choice_at(self._problem, whole_number("stages", stages), size)


def cluster_for(known: Cluster, num_ranks: int, gpus_per_node: int, memory_bytes: float | None) -> Cluster:
    """Returns a cluster of other ranks like those that were measured.

    Raises:
        MeasureError: links are needed that were not measured.
    """
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
