"""Turns a plan into what the simulator needs, and into the schedule that ranks run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph, Value
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.schedule import POLICIES, Edge, Pipeline, Policy, Schedule, StageTimes, simulate


def pipeline_of(plan: Plan, graph: Graph) -> Pipeline:
    """Returns the plan as the simulator sees it. Needs nothing but the plan and the graph: no profile, no cluster."""
    stages = tuple(_times(stage) for stage in plan.stages)
    edges = edges_of(graph, [stage.blocks for stage in plan.stages], plan.micro_batch_size)
    return Pipeline(
        stages,
        edges,
        plan.num_ranks,
        plan.num_micro_batches,
        plan.link,
        plan.needs_gradient,
        plan.overhead_seconds,
        plan.optimizer_seconds(),
    )


def schedule_of(plan: Plan, graph: Graph) -> Schedule:
    """Returns the instructions of each rank: the same, bit for bit, wherever plan and graph are the same."""
    return simulate(pipeline_of(plan, graph), policy_of(plan.schedule)).schedule


def policy_of(name: str) -> Policy:
    """Returns the policy of that name.

    Raises:
        PlanError: if there is none.
    """
    if name not in POLICIES:
        raise PlanError(f"schedule is {name!r}, expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def edges_of(graph: Graph, stages: Sequence[Sequence[int]], micro_batch_size: float) -> tuple[Edge, ...]:
    """Returns the messages between stages: a value goes from each stage that has it to the next one that uses it."""
    stage_of = {block: s for s, blocks in enumerate(stages) for block in blocks}
    values: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for value in graph.values:
        holders = sorted({stage_of[block] for block in (value.producer, *value.consumers)})
        for pair in pairwise(holders):
            values[pair].append(value)
    return tuple(_edge(s, t, values[s, t], micro_batch_size) for s, t in sorted(values))


def _edge(source: int, destination: int, values: Sequence[Value], micro_batch_size: float) -> Edge:
    gradients = [value for value in values if value.needs_gradient]
    return Edge(
        source,
        destination,
        forward_bytes=sum(value.size.at(micro_batch_size) for value in values),
        backward_bytes=sum(value.size.at(micro_batch_size) for value in gradients),
        needs_gradient=bool(gradients),
    )


def _times(stage: StagePlan) -> StageTimes:
    return StageTimes(
        ranks=stage.ranks,
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        in_flight=stage.in_flight,
        needs_recompute=stage.needs_recompute,
        recompute_seconds=stage.recompute_seconds,
        reduce_seconds=stage.reduce_seconds,
        speeds=stage.speeds,
        deferred=stage.deferred,
        input_seconds=stage.input_seconds,
        weight_seconds=stage.weight_seconds,
    )
