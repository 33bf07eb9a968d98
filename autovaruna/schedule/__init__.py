"""Schedules: instructions as data, policies that order them, rules, and the simulator."""

from autovaruna.schedule.bound import Bounds, lower_bound
from autovaruna.schedule.check import check
from autovaruna.schedule.depth import deepest_in_flight, latency_depth, textbook_depth
from autovaruna.schedule.instruction import Instruction, Kind, Schedule
from autovaruna.schedule.pipeline import Edge, Links, Pipeline, StageTimes, free_link
from autovaruna.schedule.policy import Policy
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulation import Event, LostTime, Reduction, Simulation
from autovaruna.schedule.simulator import replay, simulate, step_seconds
from autovaruna.schedule.timeline import draw, render

__all__ = [
    "POLICIES",
    "Bounds",
    "Edge",
    "Event",
    "Instruction",
    "Kind",
    "Links",
    "LostTime",
    "Pipeline",
    "Policy",
    "Reduction",
    "Schedule",
    "Simulation",
    "StageTimes",
    "check",
    "deepest_in_flight",
    "draw",
    "free_link",
    "latency_depth",
    "lower_bound",
    "render",
    "replay",
    "simulate",
    "step_seconds",
    "textbook_depth",
]
