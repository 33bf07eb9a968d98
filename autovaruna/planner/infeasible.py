"""Says why no plan fits: what is missing, where, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autovaruna.planner.chain import partition_chain
from autovaruna.planner.costs import Array
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.sized import Sized


def explain_infeasible(problem: Problem, tables: RangeTables, counts: Sequence[int]) -> str:
    """Returns what a user needs to know: bytes missing, the stage, the largest block, what would make it fit."""
    sized = Sized(problem, tables, max(counts))
    stages = _stage_count(problem, tables)
    limit = max(problem.cluster.memory_bytes)
    costs = _least_bytes(sized)
    split = partition_chain([costs] * stages)
    if split is None:
        return f"no plan: the model cannot be split into {stages} stages"
    ends = [*split.starts[1:], tables.num_segments]
    loads = [float(costs[i, j]) for i, j in zip(split.starts, ends, strict=True)]
    worst = int(np.argmax(loads))
    first, last = int(tables.positions[split.starts[worst]]), int(tables.positions[ends[worst]]) - 1
    blocks = problem.graph.blocks
    return (
        f"no plan fits into memory: the best split into {stages} stages of {max(counts)} micro-batches needs "
        f"{readable(loads[worst])} for stage {worst} ({blocks[first].name} to {blocks[last].name}), a rank has "
        f"{readable(limit)}: {readable(max(loads[worst] - limit, 0))} are missing. {_largest_block(sized)}. "
        f"{_advice(problem, sized, limit, max(loads))}"
    )


def _stage_count(problem: Problem, tables: RangeTables) -> int:
    constraints = problem.constraints
    forced = constraints.num_stages or len(constraints.stage_ranks)
    if constraints.cuts:
        forced = len(constraints.cuts) + 1
    return forced or min(problem.cluster.num_ranks // max(constraints.num_replicas, 1), tables.num_segments)


def _least_bytes(sized: Sized) -> Array:
    """Returns the least bytes of each range with one micro-batch in flight."""
    ways = [sized.recomputed_bytes if again else sized.plain_bytes for again in sized.recompute_choices]
    return np.asarray(np.minimum.reduce([fixed + each for fixed, each in ways]))


def _largest_block(sized: Sized) -> str:
    tables, blocks = sized.tables, sized.problem.graph.blocks
    costs = _least_bytes(sized)
    each = np.array([costs[i, i + 1] for i in range(tables.num_segments)])
    largest = int(each.argmax())
    state = float(sized.model.fixed(sized.held)[largest, largest + 1])
    return (
        f"The largest block is {blocks[int(tables.positions[largest])].name}: {readable(float(each[largest]))}, "
        f"of which {readable(state)} are parameters, gradients and optimizer state"
    )


def _advice(problem: Problem, sized: Sized, limit: float, needed: float) -> str:
    ways = [f"give each rank {readable(needed)} or more (memory_limit_bytes, memory_margin)"]
    constraints, tables = problem.constraints, sized.tables
    largest = max(float(_least_bytes(sized)[i, i + 1]) for i in range(tables.num_segments))
    if largest <= limit and not (constraints.num_stages or constraints.cuts or constraints.stage_ranks):
        ways.append("use more ranks")
    if largest <= limit and (constraints.num_stages or constraints.cuts or constraints.num_replicas):
        ways.append("drop num_stages, num_replicas and cuts, or ask for more stages")
    if constraints.recompute == "none" and problem.needs_gradient:
        ways.append("allow recompute")
    if sized.micro_batch_size > 1 and max(1, sized.num_micro_batches) < problem.global_batch_size:
        ways.append("allow more, smaller micro-batches (num_micro_batches, max_micro_batches)")
    return "To make it fit: " + "; or ".join(ways)


def readable(num_bytes: float) -> str:
    """Returns bytes as a person writes them: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
