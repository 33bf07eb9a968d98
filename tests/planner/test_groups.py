"""Groups of ranks: their search meets every plan, in the order of bounds that no plan beats."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.exhaustive import GroupSearch, is_small
from autovaruna.planner.placement import classes_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from tests.planner.brute import every_plan, small_problem
from tests.planner.cases import make_problem, make_uneven


def searches(problem: Problem, forced_stages: int = 0) -> dict[int, GroupSearch]:
    tables = RangeTables(problem.graph, range(len(problem.graph.blocks) + 1))
    return {
        count: GroupSearch(SizedProblem(problem, tables, count), forced_stages) for count in micro_batch_counts(problem)
    }


def shape(plan: Plan, classes: tuple[int, ...]) -> tuple[object, ...]:
    """A plan up to the exchange of ranks of one class."""
    return tuple((stage.blocks[0], tuple(classes[rank] for rank in stage.ranks)) for stage in plan.stages)


# The seeds from 400 on: plans that an earlier search, by its formula alone, missed by 1 to 7 %.
@pytest.mark.parametrize("seed", [*range(12), 417, 462, 709, 757, 1094, 1802])
def test_every_plan_is_met_and_none_beats_its_bound(seed: int) -> None:
    dice = random.Random(seed * 7 + 1)
    problem = make_uneven(small_problem(seed), dice, dice.randint(1, 3))
    classes = classes_of(problem.cluster)
    bounds = {}
    for count, search in searches(problem).items():
        met = [
            (
                seconds,
                (
                    count,
                    tuple((s, tuple(classes[r] for r in ranks)) for s, ranks in zip(c.starts, c.ranks, strict=True)),
                ),
            )
            for seconds, c in search.in_order()
        ]
        assert all(one <= other for (one, _), (other, _) in pairwise(met))
        assert len({name for _, name in met}) == len(met)
        assert all(search.least_seconds <= seconds for seconds, _ in met)
        bounds.update({name: seconds for seconds, name in met})
    for plan in every_plan(problem, is_ordered=False):
        bound = bounds[plan.num_micro_batches, shape(plan, classes)]
        assert bound * (1 - 1e-9) <= plan.predicted_seconds, (seed, plan)


def test_only_forced_numbers_of_stages_and_replicas_are_met() -> None:
    problem = make_problem(6, 4, 8, num_replicas=2, num_stages=2)
    for count, search in searches(problem, 2).items():
        met = [candidate for _, candidate in search.in_order()]
        assert len(met) == 5, count
        assert {tuple(len(ranks) for ranks in candidate.ranks) for candidate in met} == {(2, 2)}


def test_six_uneven_ranks_and_ten_blocks_are_planned_without_rest() -> None:
    problem = make_uneven(make_problem(10, 6, 24, memory_bytes=3e6), random.Random(0))
    assert is_small(problem, 10)
    single = replace(problem, constraints=replace(problem.constraints, max_stages_per_rank=1))
    assert "every plan that these leave was simulated" in make_plan(single).bound_proof
    assert "every plan with one stage a rank that these leave" in make_plan(problem).bound_proof


def test_large_problems_are_left_to_the_formula() -> None:
    assert not is_small(make_problem(8, 17), 8)
    assert not is_small(make_problem(8, 2, stage_ranks=((0,), (1,))), 8)
