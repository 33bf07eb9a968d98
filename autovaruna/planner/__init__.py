"""Plans: `Graph`, `Profile` and `Cluster` in, `Plan` out."""

from autovaruna.planner.pipeline import pipeline_of, policy_of, schedule_of
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.planner.search import make_plan

__all__ = ["Constraints", "Plan", "Problem", "StagePlan", "make_plan", "pipeline_of", "policy_of", "schedule_of"]
