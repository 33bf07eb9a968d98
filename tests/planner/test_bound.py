"""The bound lies below every plan there is, whatever memory, speeds, hosts, links and settings."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autovaruna.planner.bound import StepBound
from autovaruna.planner.options import micro_batch_counts
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.search import make_plan
from autovaruna.planner.sized import Sized
from tests.planner.brute import every_plan, small_problem
from tests.planner.cases import make_problem, make_uneven


def bounds(problem: Problem) -> dict[int, float]:
    tables = RangeTables(problem.graph, range(len(problem.graph.blocks) + 1))
    return {m: StepBound(Sized(problem, tables, m)).seconds(float("inf")) for m in micro_batch_counts(problem)}


def forced(problem: Problem, dice: random.Random) -> Problem:
    """The problem with a random choice that the user has already made."""
    choice = dice.choice([{}, {}, {"recompute": "all"}, {"recompute": "none"}, {"in_flight": dice.randint(1, 2)}])
    return replace(problem, constraints=replace(problem.constraints, **choice))


@pytest.mark.parametrize("start", range(0, 160, 40))
def test_no_plan_beats_it(start: int) -> None:
    for seed in range(start, start + 40):
        dice = random.Random(seed)
        problem = forced(make_uneven(small_problem(seed), dice, dice.randint(1, 3)), dice)
        least = bounds(problem)
        for plan in every_plan(problem, is_ordered=False):
            assert least[plan.num_micro_batches] <= plan.predicted_seconds, (seed, plan)


def test_plans_short_of_memory_are_known_to_be_slow() -> None:
    """Where memory leaves one micro-batch in flight, ranks wait for each other, and the bound knows."""
    for memory_bytes, gap in ((1e12, 0.05), (1.1e6, 0.15)):
        problem = make_problem(8, 4, 32, memory_bytes=memory_bytes, num_stages=4, recompute="none")
        assert make_plan(problem).gap < gap


@pytest.mark.parametrize("cuts", [("layers.1", "layers.3"), ("layers.2",)])
def test_forced_cuts_are_charged_as_they_are(cuts: tuple[str, ...]) -> None:
    problem = make_problem(8, 3, 12, cuts=cuts, num_replicas=1)
    assert make_plan(problem).gap < 0.05
