"""Schedules: instructions as data, policies that order them, rules, and the simulator."""

from autovaruna.schedule.bound import Bounds, lower_bound
from autovaruna.schedule.check import check
from autovaruna.schedule.instruction import Instruction, Kind, Schedule
from autovaruna.schedule.pipeline import (
    Edge,
    Links,
    Pipeline,
    StageTimes,
    deepest_in_flight,
    free_link,
    latency_depth,
    textbook_depth,
)
from autovaruna.schedule.policy import Policy
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulation import Event, LostTime, Reduction, Simulation, draw, render
from autovaruna.schedule.simulator import replay, simulate, step_seconds

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
