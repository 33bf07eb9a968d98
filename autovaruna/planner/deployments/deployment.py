"""Defines `Deployment`: a plan with what it is valid for, its cuts named as a person would name them.

It is kept in a file that a person can read and edit (`deployment_file`): the block where each stage starts, its ranks,
recompute and in-flight depth. Predicted numbers stand beside them and are only used to order the instructions of a
step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autovaruna.errors import DeploymentError, PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner.cuts import resolve_cuts, stage_blocks
from autovaruna.planner.deployments.edited import memory_complaint
from autovaruna.planner.deployments.fingerprint import Fingerprint
from autovaruna.planner.records import Plan


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
