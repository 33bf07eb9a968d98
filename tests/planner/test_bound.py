"""The bound lies below every plan there is, whatever memory, speeds, hosts, links and settings."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autovaruna.planner.bound import bound_of_all
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from autovaruna.profiler.records import OptimizerCost
from tests.planner.brute import EveryDepth, small_problem
from tests.planner.cases import constrained, make_problem, make_uneven
from tests.products import some


def forced(problem: Problem, dice: random.Random) -> Problem:
    choice = dice.choice([{}, {}, {"recompute": "all"}, {"recompute": "none"}, {"in_flight": dice.randint(1, 2)}])
    return constrained(problem, **choice)


def with_counters(problem: Problem) -> Problem:
    """The problem with every third block a counter: it needs nothing, and what goes past it is used behind."""
    n = len(problem.graph.blocks)
    values = tuple(
        replace(value, consumers=(min(value.producer + 2, n - 1),)) if value.producer % 3 == 0 else value
        for value in problem.graph.values
        if value.producer % 3 != 1
    )
    rows = tuple(
        tuple(replace(cost, forward_seconds=0.0, backward_seconds=0.0) if k % 3 == 1 else cost for k, cost in row)
        for row in map(enumerate, problem.profile.costs)
    )
    return replace(problem, graph=replace(problem.graph, values=values), profile=replace(problem.profile, costs=rows))


def drawn(kind: str, seed: int) -> Problem:
    """A small problem on uneven ranks."""
    dice = random.Random(seed)
    if kind == "counters":
        return with_counters(make_uneven(make_problem(5, 3, 4, seed, skips=dice.randint(0, 2)), dice))
    problem = make_uneven(small_problem(seed), dice, dice.randint(1, 3))
    if kind == "stages":
        each = make_uneven(make_problem(5, 3, dice.randint(3, 6), seed), dice)
        return constrained(each, num_stages=dice.randint(2, 3), num_replicas=dice.choice([0, 0, 1]))
    if kind == "sharing":
        cost = OptimizerCost(1e-4, dice.choice([0.0, 1e-8, 1e-7]))
        return replace(problem, shares_state=True, optimizer_bytes_factor=2.0, optimizer_cost=cost)
    return forced(problem, dice)


@pytest.mark.parametrize("kind", ["forced", "counters", "sharing", "stages"])
@pytest.mark.parametrize("start", some(range(0, 160, 40), 1))
def test_no_plan_beats_it(kind: str, start: int) -> None:
    """Counters are blocks that need nothing."""
    for seed in range(start, start + (8 if kind == "counters" else 40)):
        problem = drawn(kind, seed)
        for count in micro_batch_counts(problem):
            every = EveryDepth(constrained(problem, num_micro_batches=count), 300)
            beaten = every.better_than(bound_of_all(every.planner.sized(count)))
            assert beaten is None, (seed, beaten)


def test_a_chain_of_stages_that_was_decided_on_comes_near_it() -> None:
    """All work over all ranks would be a fourth less, of two stages and four micro-batches."""
    problem = make_problem(40, 2, 4, num_stages=2, num_micro_batches=4)
    assert 0 <= make_plan(problem).gap < 0.03
