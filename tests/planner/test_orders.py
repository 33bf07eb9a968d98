"""Schedules of other graphs than the planned one: messages that the plan does not know change the order."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from autovaruna.errors import ScheduleError
from autovaruna.planner.prediction import Dependence, RankOrders
from autovaruna.planner.search import make_plan
from autovaruna.schedule.check import check
from autovaruna.schedule.pipeline import Edge, Pipeline
from tests.planner.cases import make_problem
from tests.products import some

CHAIN: list[Dependence] = [(0, 1, True), (1, 2, True)]


@cache
def orders(seed: int, schedule: str) -> RankOrders:
    """Returns those of a plan of three stages, between which few values go, and fewer have a gradient."""
    problem = make_problem(
        6, 2, 8, seed, loose=True, skips=1, stage_ranks=((0,), (0,), (1,)), schedule=schedule, num_micro_batches=5
    )
    values = tuple(replace(value, needs_gradient=False) for value in problem.graph.values)
    problem = replace(problem, graph=replace(problem.graph, values=values))
    return RankOrders(make_plan(problem), problem.graph)


def with_edges(pipeline: Pipeline, dependences: list[Dependence]) -> Pipeline:
    """Returns the pipeline with these edges alone."""
    return replace(pipeline, edges=tuple(Edge(s, t, 0.0, 0.0, back) for s, t, back in dependences))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "varuna"])
def test_a_graph_with_more_messages_has_a_schedule_of_its_own(schedule: str) -> None:
    """Some planned orders would have ranks wait for ever; the new ones run to their end."""
    num_stuck = 0
    for seed in some(range(12), 4):
        mine = orders(seed, schedule)
        chain = with_edges(mine.pipeline, CHAIN)
        check(mine.along(CHAIN), chain)
        try:
            check(mine.planned, chain)
        except ScheduleError:
            num_stuck += 1
    assert num_stuck > 0


def test_a_graph_with_fewer_messages_keeps_the_planned_schedule() -> None:
    rng = random.Random(0)
    for seed in some(range(12), 4):
        mine = orders(seed, "1f1b")
        known = [(edge.source, edge.destination, edge.needs_gradient) for edge in mine.pipeline.edges]
        assert mine.along(rng.sample(known, rng.randint(0, len(known)))) is mine.planned
