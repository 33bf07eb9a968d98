"""Checks the memory of a plan that a person may have edited, without a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Costs
from autovaruna.planner.deployments.fingerprint import Fingerprint
from autovaruna.planner.infeasible import readable
from autovaruna.planner.memory.holdings import holdings_of_stage
from autovaruna.planner.memory.rank_memory import bytes_of_ranks
from autovaruna.planner.memory.stage_memory import MemoryModel
from autovaruna.planner.predicting.folding import telling
from autovaruna.planner.predicting.pipeline import pipeline_of, policy_of
from autovaruna.planner.records import Plan
from autovaruna.schedule import simulate

_ROUNDING = 1e-6


def memory_complaint(plan: Plan, valid_for: Fingerprint, graph: Graph) -> str:
    """Returns which rank has too little memory for its stages; empty if all fit, or the plan does not say enough."""
    known = plan.block_bytes
    if known is None or len(valid_for.memory_bytes) != plan.num_ranks:
        return ""
    deferred_bytes = known.deferred_bytes or (0.0,) * len(known.saved_bytes)
    if not len(known.saved_bytes) == len(known.work_bytes) == len(deferred_bytes) == len(graph.blocks):
        return ""
    size = math.ceil(plan.micro_batch_size - 1e-9)
    saved, work = (np.array(each) * (size / known.micro_batch_size) for each in (known.saved_bytes, known.work_bytes))
    deferred = np.array(deferred_bytes) * (size / known.micro_batch_size)
    none = np.zeros_like(saved)
    costs = Costs(float(size), none, none, saved, work, none, none, deferred)
    factor = float(valid_for.settings.get("optimizer_bytes_factor", 0.0))
    rules = (known.process_bytes, known.fragmentation, known.work_of_all, known.work_of_largest)
    model = MemoryModel(factor, plan.needs_gradient, *rules)
    limits = [limit + known.process_bytes for limit in valid_for.memory_bytes]  # a limit is for what the model brings
    if _first_above(_by_depths(plan, graph, costs, model), limits) is None:
        return ""
    pipeline = telling(pipeline_of(plan, graph))
    schedule = simulate(pipeline, policy_of(plan.schedule)).schedule
    held = [holdings_of_stage(graph, costs, stage.blocks) for stage in plan.stages]
    needed = bytes_of_ranks(plan, held, model, pipeline, schedule)
    rank = _first_above(needed, limits)
    if rank is None:
        return ""
    own = [str(number) for number, stage in enumerate(plan.stages) if rank in stage.ranks]
    return (
        f"rank {rank} has {readable(valid_for.memory_bytes[rank])}, but its stages ({', '.join(own)}) need "
        f"{readable(needed[rank])}: move a cut, lower in_flight, let them recompute, or give the rank fewer stages"
    )


def _by_depths(plan: Plan, graph: Graph, costs: Costs, model: MemoryModel) -> Sequence[float]:
    """Returns what ranks need if all their stages reach their in-flight depths: quick, and more than they need."""
    stages = []
    for stage in plan.stages:
        held = holdings_of_stage(graph, costs, stage.blocks)
        share = -(-plan.num_micro_batches // len(stage.ranks))
        num_bytes = model.of_stage(held, stage.needs_recompute)
        peak = num_bytes.peak(stage.in_flight, share, model.process_bytes, stage.deferred)
        stages.append(replace(stage, memory_bytes=peak.num_bytes, shared_bytes=peak.shared_bytes))
    return replace(plan, stages=tuple(stages), rank_memory_bytes=()).rank_bytes()


def _first_above(needed: Sequence[float], limits: Sequence[float]) -> int | None:
    each = zip(needed, limits, strict=True)
    return next((rank for rank, (used, limit) in enumerate(each) if used > limit * (1 + _ROUNDING)), None)
