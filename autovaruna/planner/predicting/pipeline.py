"""Turns a plan into what the simulator needs."""

from __future__ import annotations

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner.predicting.edges import Edges
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.schedule import POLICIES, Pipeline, Policy, StageTimes


def pipeline_of(plan: Plan, graph: Graph, edges: Edges | None = None) -> Pipeline:
    """Returns the plan as the simulator sees it. Needs nothing but the plan and the graph: no profile, no cluster.

    Args:
        plan: the plan.
        graph: its graph.
        edges: of the graph, if they are at hand.
    """
    return Pipeline(
        tuple(_times(stage) for stage in plan.stages),
        (edges or Edges(graph)).between(tuple(stage.blocks for stage in plan.stages), plan.micro_batch_size),
        plan.num_ranks,
        plan.num_micro_batches,
        plan.link,
        plan.needs_gradient,
        plan.overhead_seconds,
        plan.optimizer_seconds(),
    )


def policy_of(name: str) -> Policy:
    """Returns the policy of that name.

    Raises:
        PlanError: if there is none.
    """
    if name not in POLICIES:
        raise PlanError(f"schedule is {name!r}, expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


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
