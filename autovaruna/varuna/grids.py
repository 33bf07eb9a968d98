"""Finds the best grid of stages and replicas, and its micro-batch size: one search of the planner for each depth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner import Constraints, Plan, Problem, make_plan
from autovaruna.planner.marks import marked_blocks
from autovaruna.profiler.records import Cluster, Profile
from autovaruna.varuna.stage_map import Grid, grid_of

_ALL_DEPTHS = 16
"""Up to so many ranks every number of stages is tried; beyond, those that leave the fewest ranks over."""


@dataclass(frozen=True)
class Choice:
    """One way to use the ranks.

    `micro_batch_size` are the most samples of a micro-batch; `seconds` and `memory_bytes` (the most of any rank) are
    predicted.
    """

    num_stages: int
    num_replicas: int
    micro_batch_size: int
    num_micro_batches: int
    seconds: float
    memory_bytes: float
    plan: Plan

    @property
    def grid(self) -> Grid:
        """The ranks of each stage."""
        return grid_of(self.num_stages, self.num_replicas)


@dataclass(frozen=True)
class Measured:
    """A model, what it costs and the ranks."""

    graph: Graph
    profile: Profile
    cluster: Cluster


@dataclass(frozen=True)
class Wishes:
    """What is already decided; 0: nothing.

    Attributes:
        batch_size: samples of a step, over all replicas.
        num_stages, chunk_size: stages, and samples of a micro-batch.
        cutpoints: where cuts may lie.
        optimizer_bytes_factor: bytes of optimizer state for each byte of a trained parameter.
        uses_all_ranks: whether every rank must have a place.
    """

    batch_size: int
    num_stages: int = 0
    chunk_size: int = 0
    cutpoints: str = "only"
    optimizer_bytes_factor: float = 2.0
    uses_all_ranks: bool = False


def depths(measured: Measured, wishes: Wishes) -> list[int]:
    """Returns the numbers of stages to try."""
    num_ranks = measured.cluster.num_ranks
    if wishes.num_stages:
        return [wishes.num_stages]
    most = len(measured.graph.blocks)
    if wishes.cutpoints == "only":
        most = len(marked_blocks(measured.graph)) + 1
    every = range(1, num_ranks + 1)
    tried: Iterable[int] = every if num_ranks <= _ALL_DEPTHS else {num_ranks // replicas for replicas in every}
    return sorted(
        depth
        for depth in tried
        if depth <= most
        and num_ranks // depth <= wishes.batch_size
        and (num_ranks % depth == 0 or not wishes.uses_all_ranks)
    )


def choice_at(measured: Measured, wishes: Wishes, num_stages: int) -> Choice:
    """Returns the best plan with so many stages, of as many replicas as there are ranks for.

    Raises:
        PlanError: none fits.
    """
    replicas = measured.cluster.num_ranks // num_stages
    if not replicas:
        raise PlanError(f"{num_stages} stages need as many ranks: there are {measured.cluster.num_ranks}")
    share = math.ceil(wishes.batch_size / replicas)
    count = replicas * math.ceil(share / wishes.chunk_size) if wishes.chunk_size else 0
    problem = Problem(
        graph=measured.graph,
        profile=measured.profile,
        cluster=_first_ranks(measured.cluster, num_stages * replicas),
        global_batch_size=wishes.batch_size,
        optimizer_bytes_factor=wishes.optimizer_bytes_factor,
        min_micro_batches_for_inputs=replicas,
        constraints=Constraints(
            num_micro_batches=min(count, wishes.batch_size),
            cutpoints=wishes.cutpoints,
            stage_ranks=grid_of(num_stages, replicas),
        ),
    )
    plan = make_plan(problem)
    size = wishes.chunk_size or math.ceil(share / (plan.num_micro_batches // replicas))
    memory = max(plan.rank_bytes())
    return Choice(num_stages, replicas, size, plan.num_micro_batches, plan.predicted_seconds, memory, plan)


def choices(measured: Measured, wishes: Wishes) -> list[Choice]:
    """Returns the best plan of each depth that fits, the fastest first.

    Raises:
        PlanError: none fits at any depth; says why for each.
    """
    found: list[Choice] = []
    refusals: list[str] = []
    for depth in depths(measured, wishes):
        try:
            found.append(choice_at(measured, wishes, depth))
        except PlanError as error:
            refusals.append(f"{depth} stages: {error}")
    if not found:
        raise PlanError(
            "no number of stages has a plan: " + ("; ".join(refusals) or "there are more ranks than samples")
        )
    return sorted(found, key=lambda choice: choice.seconds)


def _first_ranks(cluster: Cluster, num_ranks: int) -> Cluster:
    return replace(
        cluster,
        hosts=cluster.hosts[:num_ranks],
        memory_bytes=cluster.memory_bytes[:num_ranks],
        speeds=cluster.speeds[:num_ranks],
        own_process_bytes=cluster.own_process_bytes[:num_ranks],
    )
