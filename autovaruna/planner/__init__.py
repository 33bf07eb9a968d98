"""Plans: `Graph`, `Profile` and `Cluster` in, `Plan` out; a plan as a file and as a table."""

from autovaruna.planner.deployment import (
    Deployment,
    Fingerprint,
    deployment_of,
    differences,
    host_counts,
    load,
    plan_from,
    save,
)
from autovaruna.planner.infeasible import readable
from autovaruna.planner.prediction import Orders, pipeline_of, policy_of
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.planner.search import make_plan
from autovaruna.planner.table import explain, plan_table

__all__ = [
    "Constraints",
    "Deployment",
    "Fingerprint",
    "Orders",
    "Plan",
    "Problem",
    "StagePlan",
    "deployment_of",
    "differences",
    "explain",
    "host_counts",
    "load",
    "make_plan",
    "pipeline_of",
    "plan_from",
    "plan_table",
    "policy_of",
    "readable",
    "save",
]
