"""Says why no plan fits: what is missing, where, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from autovaruna.errors import PlanError
from autovaruna.planner.chain import partition_chain
from autovaruna.planner.costs import Array
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.sized import Sized

_FEW_RANKS = 16
_FEW_BLOCKS = 1000
_ROUNDED_UP = 1.006
"""Three digits of a number with this on top are no less than the number."""


@dataclass(frozen=True, slots=True)
class _Shortage:
    """The rank that lacks most, in the split that lacks least: its stages, what they need and what it has."""

    num_stages: int
    rank: int
    blocks: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]
    needed_bytes: float
    limit_bytes: float

    @property
    def ratio(self) -> float:
        """What is needed over what is there."""
        return self.needed_bytes / self.limit_bytes


def explain_infeasible(problem: Problem, tables: RangeTables, counts: Sequence[int]) -> PlanError:
    """Returns what a user needs to know: bytes missing, the stage, the largest block, what would make it fit."""
    sized = Sized(problem, tables, max(counts))
    n = len(problem.graph.blocks)
    by_block = Sized(problem, RangeTables(problem.graph, range(n + 1)), max(counts)) if n <= _FEW_BLOCKS else sized
    found = [shortage for ranks in _rank_choices(problem, tables) if (shortage := _shortage(sized, ranks))]
    if not found:
        stages = len(next(_rank_choices(problem, tables)))
        return PlanError(
            f"no plan: the model cannot be split into {stages} stages, it has {tables.num_segments} places to cut"
        )
    worst = min(found, key=lambda shortage: shortage.ratio)
    missing = readable(max(worst.needed_bytes - worst.limit_bytes, 0.0))
    error = PlanError(
        f"no plan fits into memory: the best split into {worst.num_stages} stages of {max(counts)} micro-batches needs "
        f"{readable(worst.needed_bytes)} for {_places(worst, problem)}, rank {worst.rank} has "
        f"{readable(worst.limit_bytes)}: {missing} are missing. {_largest_block(by_block)}. "
        f"To make it fit: {'; or '.join(_advice(problem, by_block, worst))}"
    )
    error.lacks_memory = True
    return error


def _rank_choices(problem: Problem, tables: RangeTables) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields ranks for the stages: the forced ones, or the ranks with most memory in a few orders."""
    constraints, cluster = problem.constraints, problem.cluster
    if constraints.stage_ranks:
        yield constraints.stage_ranks
        return
    forced = constraints.num_stages or (len(constraints.cuts) + 1 if constraints.cuts else 0)
    replicas = max(constraints.num_replicas, 1)
    most = min(cluster.num_ranks // replicas, tables.num_segments)
    largest = sorted(range(cluster.num_ranks), key=lambda rank: -cluster.memory_bytes[rank])
    for stages in [forced] if forced else range(most, 0, -1) if most <= _FEW_RANKS else [most]:
        chosen = largest[: stages * replicas]
        for order in (chosen, chosen[::-1], sorted(chosen)):
            in_turn = cycle(order)  # with more stages than ranks, each has several
            yield tuple(tuple(islice(in_turn, replicas)) for _ in range(stages))


def _shortage(sized: Sized, ranks: tuple[tuple[int, ...], ...]) -> _Shortage | None:
    """Returns what the best split over some ranks lacks, None if the model cannot be split so often."""
    limits, tables = sized.problem.cluster.memory_bytes, sized.tables
    costs = [_least_bytes(sized, len(each)) for each in ranks]
    split = partition_chain([c / min(limits[rank] for rank in each) for c, each in zip(costs, ranks, strict=True)])
    if split is None:
        return None
    ends = [*split.starts[1:], tables.num_segments]
    loads = [float(c[i, j]) for c, i, j in zip(costs, split.starts, ends, strict=True)]
    held = {rank: tuple(s for s, each in enumerate(ranks) if rank in each) for each in ranks for rank in each}
    rank = max(held, key=lambda rank: sum(loads[s] for s in held[rank]) / limits[rank])
    stages = held[rank]
    blocks = tuple((int(tables.positions[split.starts[s]]), int(tables.positions[ends[s]]) - 1) for s in stages)
    return _Shortage(len(ranks), rank, blocks, stages, sum(loads[s] for s in stages), limits[rank])


def _places(shortage: _Shortage, problem: Problem) -> str:
    """Returns the stages of the rank that lacks most, with their first and last blocks."""
    names = [(problem.graph.blocks[first].name, problem.graph.blocks[last].name) for first, last in shortage.blocks]
    stages = [f"stage {s} ({a} to {b})" for s, (a, b) in zip(shortage.stages, names, strict=True)]
    return " and ".join(stages)


def _least_bytes(sized: Sized, num_replicas: int) -> Array:
    """Returns the least bytes of each range: with as few micro-batches in flight as the settings allow."""
    constraints = sized.problem.constraints
    share = -(-sized.num_micro_batches // num_replicas)
    depth = share if constraints.schedule == "gpipe" else min(constraints.in_flight or 1, share)
    ways = [sized.recomputed_bytes if again else sized.plain_bytes for again in sized.recompute_choices]
    return np.asarray(np.minimum.reduce([num_bytes.at(depth, share) for num_bytes in ways]))


def _bytes_of_segments(sized: Sized) -> Array:
    least = _least_bytes(sized, max(sized.problem.constraints.num_replicas, 1))
    return np.array([least[i, i + 1] for i in range(sized.tables.num_segments)])


def _largest_block(sized: Sized) -> str:
    tables, blocks = sized.tables, sized.problem.graph.blocks
    each = _bytes_of_segments(sized)
    largest = int(each.argmax())
    state = float(sized.model.fixed(sized.held)[largest, largest + 1])
    is_one = tables.positions[largest + 1] - tables.positions[largest] == 1
    return (
        f"The largest {'block is' if is_one else 'part that is never cut starts at'} "
        f"{blocks[int(tables.positions[largest])].name}: {readable(float(each[largest]))}, "
        f"of which {readable(state)} are parameters, gradients and optimizer state"
    )


def _advice(problem: Problem, sized: Sized, worst: _Shortage) -> Iterator[str]:
    constraints, limits = problem.constraints, problem.cluster.memory_bytes
    whose = "each rank" if len(set(limits)) == 1 else f"rank {worst.rank}"
    margin = problem.cluster.memory_margin
    left = f", of which {margin:.0%} are left free: memory_margin" if margin else ""
    enough = worst.needed_bytes / (1.0 - margin) * _ROUNDED_UP
    yield f"give {whose} {readable(enough)} or more (memory_limit_bytes{left})"
    fits_alone = float(_bytes_of_segments(sized).max()) <= max(limits)
    if not fits_alone:
        yield "make its largest block smaller, since more ranks do not help a block that one rank must hold"
    is_forced = constraints.num_stages or constraints.cuts or constraints.stage_ranks
    if fits_alone and not is_forced:
        yield "use more ranks" + (", or drop num_replicas" if constraints.num_replicas else "")
    if is_forced and worst.num_stages < len(limits):
        yield "drop num_stages, num_replicas, stage_ranks and cuts, or ask for more stages"
    if len(worst.stages) > 1:
        yield f"give rank {worst.rank} fewer of the stages (stage_ranks)"
    if constraints.recompute == "none" and problem.needs_gradient:
        yield "allow recompute"
    if constraints.in_flight > 1:
        yield "lower in_flight"
    if constraints.schedule == "gpipe":
        yield "use another schedule, since gpipe holds all its micro-batches"
    if sized.micro_batch_size > 1 and sized.num_micro_batches < problem.global_batch_size:
        yield "allow more, smaller micro-batches (num_micro_batches, max_micro_batches)"


def readable(num_bytes: float) -> str:
    """Returns bytes as a person writes them: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.{3 + (num_bytes >= 999.5)}g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
