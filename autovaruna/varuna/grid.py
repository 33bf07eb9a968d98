"""Lays stages and replicas over ranks: reads ``stage_to_rank_map``, finds the best grid, says where a rank is in it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autovaruna.errors import InputError, PlanError
from autovaruna.planner.cut_points import cut_point_blocks
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import Cluster
from autovaruna.ranks.environment import local_rank_in
from autovaruna.ranks.world import World

AUTO = "auto"  # what the launcher passes on in place of a map that is still to be found

Grid = tuple[tuple[int, ...], ...]  # the ranks of each stage
StageMap = Mapping[int, Sequence[int]] | Sequence[Sequence[int]] | str | None
_ALL_DEPTHS = 16  # up to so many ranks every number of stages is tried; beyond, those that leave the fewest ranks over


def grid_of(num_stages: int, num_replicas: int) -> Grid:
    """Returns the map that Varuna's launcher makes: the stages of a replica are on neighbouring ranks."""
    num_ranks = num_stages * num_replicas
    return tuple(tuple(range(stage, num_ranks, num_stages)) for stage in range(num_stages))


def read_map(stage_to_rank_map: StageMap, num_ranks: int) -> Grid | None:
    """Returns the ranks of each stage; None: the map is to be found.

    `stage_to_rank_map` is ``{stage: ranks}``, a list of lists, ``"0,2;1,3"`` or ``"0,2;1,3;"``, None or ``"auto"``.
    Raises InputError if it is no map, or does not give every rank its place.
    """
    if stage_to_rank_map is None or stage_to_rank_map in ("", AUTO):
        return None
    try:
        grid = _ranks_of_stages(stage_to_rank_map)
    except (TypeError, ValueError, KeyError):
        raise InputError(
            f"stage_to_rank_map is {stage_to_rank_map!r}: expected the ranks of each stage, as "
            "{0: [0, 2], 1: [1, 3]} or '0,2;1,3'; None lets it be found."
        ) from None
    if complaint := _complaint(grid, num_ranks):
        text = ";".join(",".join(map(str, ranks)) for ranks in grid)
        raise InputError(f"stage_to_rank_map is {text!r} for {num_ranks} ranks: {complaint}.")
    return grid


def _ranks_of_stages(given: StageMap) -> Grid:
    if isinstance(given, str):
        stages = given.rstrip("; ").split(";")
        return tuple(tuple(int(rank) for rank in stage.split(",")) for stage in stages)
    if isinstance(given, Mapping):
        numbered = {int(stage): ranks for stage, ranks in given.items()}
        given = [numbered[stage] for stage in range(len(numbered))]
    assert given is not None
    return tuple(tuple(int(rank) for rank in ranks) for ranks in given)


def _complaint(grid: Grid, num_ranks: int) -> str:
    named = [rank for ranks in grid for rank in ranks]
    if not named or not all(grid):
        return "got a stage without ranks; expected at least one for each"
    unknown = sorted({rank for rank in named if not 0 <= rank < num_ranks})
    if unknown:
        return f"got rank {unknown[0]}; expected ranks from 0 to {num_ranks - 1}. Start more, or name these"
    if len(set(named)) < len(named):
        return "got a rank twice; expected each in one place"
    missing = sorted(set(range(num_ranks)) - set(named))
    return f"rank {missing[0]} is in no stage; name it, or start {len(named)} ranks" if missing else ""


@dataclass(frozen=True)
class GridOption:
    """One way to use the ranks; seconds and bytes are predicted."""

    num_stages: int
    num_replicas: int
    micro_batch_size: int  # the most samples of one
    num_micro_batches: int
    seconds: float
    memory_bytes: float  # the most of any rank
    plan: Plan

    @property
    def grid(self) -> Grid:
        """The ranks of each stage."""
        return grid_of(self.num_stages, self.num_replicas)


def depths(problem: Problem, uses_all_ranks: bool = False) -> list[int]:
    """Returns the numbers of stages to try."""
    num_ranks, most = problem.cluster.num_ranks, len(problem.graph.blocks)
    if problem.constraints.cutpoints == "only":
        most = len(cut_point_blocks(problem.graph)) + 1
    every = range(1, num_ranks + 1)
    tried: Iterable[int] = every if num_ranks <= _ALL_DEPTHS else {num_ranks // replicas for replicas in every}
    return sorted(
        depth
        for depth in tried
        if depth <= most
        and num_ranks // depth <= problem.global_batch_size
        and (num_ranks % depth == 0 or not uses_all_ranks)
    )


def choice_at(problem: Problem, num_stages: int, chunk_size: int = 0) -> GridOption:
    """Returns the best plan with so many stages, of as many replicas as there are ranks for; PlanError if none fits."""
    batch_size, replicas = problem.global_batch_size, problem.cluster.num_ranks // num_stages
    if not replicas:
        raise PlanError(f"{num_stages} stages need as many ranks: there are {problem.cluster.num_ranks}")
    share = math.ceil(batch_size / replicas)
    count = replicas * math.ceil(share / chunk_size) if chunk_size else 0
    grid, cluster = grid_of(num_stages, replicas), _first_ranks(problem.cluster, num_stages * replicas)
    forced = replace(problem.constraints, num_micro_batches=min(count, batch_size), stage_ranks=grid)
    plan = make_plan(replace(problem, cluster=cluster, min_micro_batches_for_inputs=replicas, constraints=forced))
    size = chunk_size or math.ceil(share / (plan.num_micro_batches // replicas))
    memory = max(plan.rank_bytes())
    return GridOption(num_stages, replicas, size, plan.num_micro_batches, plan.predicted_seconds, memory, plan)


def choices(problem: Problem, chunk_size: int = 0, uses_all_ranks: bool = False) -> list[GridOption]:
    """Returns the best plan of each depth that fits, the fastest first; PlanError, with each reason, if none fits."""
    found: list[GridOption] = []
    refusals: list[str] = []
    for depth in depths(problem, uses_all_ranks):
        try:
            found.append(choice_at(problem, depth, chunk_size))
        except PlanError as error:
            refusals.append(f"{depth} stages: {error}")
    if not found:
        raise PlanError(
            "no number of stages has a plan: " + ("; ".join(refusals) or "there are more ranks than samples")
        )
    return sorted(found, key=lambda choice: choice.seconds)


def _first_ranks(cluster: Cluster, num_ranks: int) -> Cluster:
    by_rank = ("hosts", "memory_bytes", "speeds", "own_process_bytes")
    return replace(cluster, **{name: getattr(cluster, name)[:num_ranks] for name in by_rank})


def local_rank_of(world: World) -> int:
    """Returns this rank's number on its host, as the launcher says, else by counting."""
    number = local_rank_in(os.environ)
    return number if number is not None else world.hosts[: world.rank].count(world.hosts[world.rank])


def device_of(device: int | str | torch.device | None, local_rank: int) -> torch.device:
    """Returns a device, by a GPU's number as well; None, as -1: that of `local_rank`; InputError if there is none."""
    device = -1 if device is None else device
    if isinstance(device, int):
        if not torch.cuda.is_available():
            return torch.device("cpu")
        number = local_rank % torch.cuda.device_count() if device < 0 else device
        if number >= torch.cuda.device_count():
            raise InputError(f"device is {device}: expected the number of one of {torch.cuda.device_count()} GPUs.")
        return torch.device("cuda", number)
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device is {device!r}, which cannot be used here: {error}.") from error
    return found
