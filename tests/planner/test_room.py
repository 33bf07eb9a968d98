"""What memory has plans lose: forwards that it does not hold until a first backward run again, or ranks are idle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import Problem
from autovaruna.planner.proof import bound_of_all, lost_seconds
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import LinkCost, Profile
from tests.planner.brute import every_plan
from tests.planner.cases import make_problem, make_uneven

CHOICES = ({"recompute": "none"}, {"num_replicas": 1}, {"num_replicas": 1, "recompute": "none"}, {})


def sized(problem: Problem) -> SizedProblem:
    tables = RangeTables(problem.graph, range(len(problem.graph.blocks) + 1))
    return SizedProblem(problem, tables, problem.constraints.num_micro_batches)


def state_bytes(problem: Problem) -> float:
    return (1.0 + problem.optimizer_bytes_factor) * sum(each.num_bytes for each in problem.graph.parameters)


def tight(seed: int) -> Problem:
    """A few blocks that keep much, on ranks with room for some of it."""
    dice = random.Random(seed)
    num_ranks, count, skips = dice.randint(2, 3), dice.choice([2, 3, 4]), dice.choice([0, 0, 2])
    more = {"num_micro_batches": count, **dice.choice(CHOICES)}
    problem = make_problem(dice.randint(2, 4), num_ranks, count, seed, skips=skips, link=LinkCost(1e-7, 1e12), **more)
    costs = tuple(
        tuple(replace(cost, saved_bytes=200 * cost.saved_bytes) for cost in row) for row in problem.profile.costs
    )
    saved = sum(cost.saved_bytes for cost in costs[0])
    limit = state_bytes(problem) * dice.choice([0.7, 0.9]) + dice.uniform(0.2, 0.7) * saved
    cluster = replace(problem.cluster, memory_bytes=(limit,) * num_ranks)
    problem = replace(problem, profile=replace(problem.profile, costs=costs), cluster=cluster)
    return make_uneven(problem, dice, dice.randint(1, 2)) if dice.random() < 0.2 else problem


@pytest.mark.parametrize("start", [0, 40])
def test_no_plan_beats_it(start: int) -> None:
    num_bound = 0
    for seed in range(start, start + 40):
        problem = tight(seed)
        at_count = sized(problem)
        least = bound_of_all(at_count)
        num_bound += lost_seconds(at_count) > 0
        for plan in every_plan(problem, most_each=2):
            assert least <= plan.predicted_seconds, (seed, plan)
    assert num_bound > 10


def equal(memory_bytes: float, **more: object) -> Problem:
    """Blocks of 1 and 2 ms on 4 ranks, that keep 1 MB of each of 8 micro-batches."""
    problem = make_problem(8, 4, 8, num_micro_batches=8, num_replicas=1, memory_bytes=memory_bytes, **more)
    cost = replace(
        problem.profile.costs[0][0], forward_seconds=1e-3, backward_seconds=2e-3, saved_bytes=1e6, work_bytes=0
    )
    return replace(problem, profile=Profile(problem.graph.fingerprint, "test", (1,), ((cost,) * 8,)))


def test_it_is_what_there_is_no_room_for() -> None:
    """Four ranks run 32 forwards of a block until a first backward can come, and have room for 24 of these."""
    state = state_bytes(equal(1e12))
    limit = (state + 24e6) / 4
    assert lost_seconds(sized(equal(limit, recompute="none"))) == pytest.approx(8e-3)
    assert lost_seconds(sized(equal(limit))) == pytest.approx(8e-3 * 8 / 9)  # One may be recomputed ahead of time.
    assert lost_seconds(sized(equal((state + 32e6) / 4))) == pytest.approx(0.0, abs=1e-9)


def test_a_plan_says_so() -> None:
    problem = equal((state_bytes(equal(1e12)) + 40e6) / 4)
    costs = tuple(tuple(replace(cost, saved_bytes=3e6) for cost in row) for row in problem.profile.costs)
    plan = make_plan(replace(problem, profile=replace(problem.profile, costs=costs)))
    assert plan.bound_seconds > 1.02 * 8 * 24e-3 / 4
    assert "memory does not hold all forwards" in plan.bound_proof
