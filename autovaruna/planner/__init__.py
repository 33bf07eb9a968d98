"""Plans: `Graph`, `Profile` and `Cluster` in, `Plan` out; a plan as a file and as a table."""

from autovaruna.planner.deployments.deployment import Deployment, deployment_of, plan_from
from autovaruna.planner.deployments.deployment_file import load, save
from autovaruna.planner.deployments.fingerprint import Fingerprint, differences, host_counts
from autovaruna.planner.infeasible import readable
from autovaruna.planner.predicting.orders import Orders
from autovaruna.planner.predicting.pipeline import pipeline_of, policy_of
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
