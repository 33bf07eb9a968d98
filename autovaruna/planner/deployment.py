"""Says what a plan is valid for, and checks a plan that a person may have edited."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autovaruna.errors import DeploymentError, PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner.cost_table import Costs
from autovaruna.planner.cut_points import resolve_cuts, stage_blocks
from autovaruna.planner.infeasible import readable
from autovaruna.planner.memory.rank_memory import bytes_of_ranks
from autovaruna.planner.memory.stage_memory import MemoryModel, holdings_of_stage
from autovaruna.planner.prediction import pipeline_of, policy_of, telling
from autovaruna.planner.records import Plan
from autovaruna.schedule.simulator import simulate


@dataclass(frozen=True)
class Fingerprint:
    """What a plan is valid for.

    Attributes:
        graph: fingerprint of the traced model.
        shapes: shape and dtype of each input, and the number of samples, as text by what it is.
        num_ranks: the number of ranks N.
        hosts: number of ranks on each host, in the order of ranks (names of hosts change from day to day).
        device: what the ranks compute on.
        memory_bytes: limit of each rank, or one number for all.
        settings: the settings that shaped the plan.
    """

    graph: str
    shapes: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    hosts: tuple[int, ...] = (1,)
    device: str = ""
    memory_bytes: tuple[float, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def host_counts(hosts: tuple[str, ...]) -> tuple[int, ...]:
    """Returns how many ranks each host has, in the order of the first rank of each."""
    return tuple(Counter(hosts).values())


def differences(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """Returns a sentence for each thing that changed since a plan was saved; empty: the plan is valid.

    A smaller memory limit makes a plan stale, a greater one too, since a better plan may fit.
    """
    told = []
    if saved.graph != now.graph:
        told.append(f"the model changed (graph {saved.graph[:12]} -> {now.graph[:12]})")
    told += _changed("", saved.shapes, now.shapes)
    if saved.num_ranks != now.num_ranks:
        told.append(f"the number of ranks changed ({saved.num_ranks} -> {now.num_ranks})")
    elif saved.hosts != now.hosts:
        told.append(f"the ranks of each host changed ({_listed(saved.hosts)} -> {_listed(now.hosts)})")
    if saved.device != now.device:
        told.append(f"the device changed ({saved.device} -> {now.device})")
    if saved.num_ranks == now.num_ranks and saved.memory_bytes != now.memory_bytes:
        told.append(f"the memory limit changed ({_bytes(saved.memory_bytes)} -> {_bytes(now.memory_bytes)})")
    return told + _changed("setting ", _plain(saved.settings), _plain(now.settings))


def _changed(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{what}{name} changed ({saved.get(name, 'not set')} -> {now.get(name, 'not set')})" for name in names]


def _plain(value: Any) -> Any:
    """Returns a value as JSON gives it back: tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def _listed(numbers: tuple[int, ...]) -> str:
    return " + ".join(str(number) for number in numbers)


def _bytes(limits: tuple[float, ...]) -> str:
    return ", ".join(dict.fromkeys(readable(limit) for limit in limits)) or "none"


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


@dataclass(frozen=True)
class Deployment:
    """A saved plan.

    Attributes:
        plan: the plan; read from a file, its stages have no blocks before `plan_from` finds them in a graph.
        cuts: the name of the first block of each stage but the first; edited by hand, a module path.
        fingerprint: what the plan is valid for.
    """

    plan: Plan
    cuts: tuple[str, ...]
    fingerprint: Fingerprint


def deployment_of(plan: Plan, graph: Graph, fingerprint: Fingerprint) -> Deployment:
    """Returns a plan as a deployment, its cuts named by block."""
    cuts = tuple(graph.blocks[stage.blocks[0]].name for stage in plan.stages[1:])
    return Deployment(plan, cuts, fingerprint)


def plan_from(deployment: Deployment, graph: Graph) -> Plan:
    """Returns the plan of a deployment for a graph.

    Raises:
        DeploymentError: if a cut names nothing in the graph, the stages cannot be, or do not fit into memory.
    """
    plan = deployment.plan
    try:
        starts = (0, *resolve_cuts(graph, deployment.cuts))
    except PlanError as error:
        raise DeploymentError(f"it does not fit the model: {error}") from error
    blocks = stage_blocks(starts, len(graph.blocks))
    stages = (replace(stage, blocks=own) for stage, own in zip(plan.stages, blocks, strict=True))
    plan = replace(plan, stages=tuple(stages))
    complaint = memory_complaint(plan, deployment.fingerprint, graph)
    if complaint:
        raise DeploymentError(f"it does not fit into memory: {complaint}")
    return plan
