"""Knows the instructions of every rank, for the graph that was planned and for others of the same model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autovaruna.errors import ScheduleError
from autovaruna.graph.records import Graph
from autovaruna.planner.predicting.folding import schedule_by_parts, telling
from autovaruna.planner.predicting.pipeline import pipeline_of, policy_of
from autovaruna.planner.records import Plan
from autovaruna.schedule import Edge, Pipeline, Policy, Schedule, check, simulate

Dependence = tuple[int, int, bool]
"""Two stages of which the later one needs what the earlier one makes; whether a gradient goes back."""


class Orders:
    """The schedules of one plan.

    Another call of the model (with layers that were frozen before, or on another path) may have messages that the
    planned one has not. Then ranks that kept the planned order could wait for each other for ever.

    Args:
        plan: The plan.
        graph: The graph that was planned.

    Raises:
        ScheduleError: the plan allows no schedule.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.pipeline = pipeline_of(plan, graph)
        self._policy = policy_of(plan.schedule)
        self.planned = checked(self.pipeline, self._policy)

    def along(self, dependences: Iterable[Dependence]) -> Schedule:
        """Returns the schedule of a graph with these dependences: the planned one, if they are among its own.

        Raises:
            ScheduleError: the plan allows no schedule.
        """
        known = {(edge.source, edge.destination): edge for edge in self.pipeline.edges}
        edges = dict(known)
        for source, destination, needs_gradient in dependences:
            edge = edges.get((source, destination)) or Edge(source, destination, 0.0, 0.0, needs_gradient)
            edges[source, destination] = replace(edge, needs_gradient=edge.needs_gradient or needs_gradient)
        if edges == known:
            return self.planned
        pipeline = replace(self.pipeline, edges=tuple(edges.values()))
        try:
            return checked(pipeline, self._policy)
        except ScheduleError:  # its depths were chosen for fewer messages
            return checked(pipeline, policy_of("1f1b"))


def checked(pipeline: Pipeline, policy: Policy) -> Schedule:
    """Returns a schedule that is proven free of deadlock; of parts that run alike, or of a long one, part by part."""
    if telling(pipeline) is not pipeline:
        return schedule_by_parts(pipeline, lambda part: _checked(part, policy))
    return _checked(pipeline, policy)


def _checked(pipeline: Pipeline, policy: Policy) -> Schedule:
    schedule = simulate(pipeline, policy).schedule
    check(schedule, pipeline)
    return schedule
