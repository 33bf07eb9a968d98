"""The bound lies below every plan there is, whatever memory, speeds, hosts, links and settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import Problem
from autovaruna.planner.proof import bound_of_single
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from autovaruna.profiler.records import OptimizerCost
from tests.planner.brute import ONE_A_RANK, every_plan, small_problem
from tests.planner.cases import constrained, make_problem, make_uneven
from tests.products import some


def bounds(problem: Problem, positions: Sequence[int] = ()) -> dict[int, float]:
    tables = RangeTables(problem.graph, positions or range(len(problem.graph.blocks) + 1))
    each = [SizedProblem(problem, tables, m) for m in micro_batch_counts(problem)]
    return {sized.num_micro_batches: bound_of_single(sized) for sized in each}


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


def drawn(kind: str, seed: int) -> tuple[Problem, Sequence[int]]:
    """A small problem on uneven ranks, and the blocks at which segments start (empty: all of them)."""
    dice = random.Random(seed)
    if kind == "counters":
        return with_counters(make_uneven(make_problem(5, 3, 4, seed, skips=dice.randint(0, 2)), dice)), ()
    problem = make_uneven(small_problem(seed), dice, dice.randint(1, 3))
    if kind == "sharing":
        cost = OptimizerCost(1e-4, dice.choice([0.0, 1e-8, 1e-7]))
        return replace(problem, shares_state=True, optimizer_bytes_factor=2.0, optimizer_cost=cost), ()
    problem, n = forced(problem, dice), len(problem.graph.blocks)
    inner = sorted(dice.sample(range(1, n), dice.randint(0, max(n - 2, 0)))) if kind == "segments" and n > 1 else []
    return problem, [0, *inner, n] if kind == "segments" else ()


@pytest.mark.parametrize("kind", ["forced", "segments", "counters", "sharing"])
@pytest.mark.parametrize("start", some(range(0, 160, 40), 1))
def test_no_plan_beats_it(kind: str, start: int) -> None:
    """Segments have cuts inside, counters are blocks that need nothing."""
    for seed in range(start, start + (8 if kind == "counters" else 40)):
        problem, positions = drawn(kind, seed)
        least = bounds(problem, positions)
        is_ordered = kind not in ("forced", "sharing")
        for plan in every_plan(problem, is_ordered=is_ordered, schedules=ONE_A_RANK):
            assert least[plan.num_micro_batches] <= plan.predicted_seconds, (seed, positions, plan)


def test_memory_is_known_where_cuts_may_lie_inside_of_segments() -> None:
    """The whole model on each rank would be fastest, and does not fit."""
    ample = make_problem(24, 3, 12)
    trained = sum(parameter.num_bytes for parameter in ample.graph.parameters)
    tight = make_problem(24, 3, 12, memory_bytes=2.4 * trained)  # of 4: weights, gradients, the optimizer's two
    least = [min(bounds(problem, range(0, 25, 2)).values()) for problem in (ample, tight)]
    assert least[1] > 1.02 * least[0]


@pytest.mark.parametrize("cuts", [("layers.1", "layers.3"), ("layers.2",)])
def test_forced_cuts_are_charged_as_they_are(cuts: tuple[str, ...]) -> None:
    problem = make_problem(8, 3, 12, cuts=cuts, num_replicas=1)
    assert make_plan(problem).gap < 0.05
