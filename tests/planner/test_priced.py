"""A plan that is priced by another profile keeps its choices, and takes what that profile says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autovaruna.planner.candidate import priced
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import BlockCost
from tests.planner.cases import make_problem
from tests.products import some


def slower(problem: Problem, factor: float) -> Problem:
    """The same problem on ranks that compute more slowly."""
    costs = tuple(tuple(_slower(cost, factor) for cost in row) for row in problem.profile.costs)
    return replace(problem, profile=replace(problem.profile, costs=costs))


def _slower(cost: BlockCost, factor: float) -> BlockCost:
    return replace(cost, forward_seconds=factor * cost.forward_seconds, backward_seconds=factor * cost.backward_seconds)


@pytest.mark.parametrize("seed", some(range(6), 3))
def test_by_its_own_profile_a_plan_takes_what_it_was_planned_to_take(seed: int) -> None:
    problem = make_problem(12, 3, 12, seed=seed, num_stages=[0, 3, 6][seed % 3])
    plan = make_plan(problem)
    again = priced(plan, problem)
    assert again.stages == plan.stages
    assert again.predicted_seconds == pytest.approx(plan.predicted_seconds)
    assert again.rank_bytes() == pytest.approx(plan.rank_bytes())


def test_on_slower_ranks_a_plan_takes_longer_and_stays_as_it_is() -> None:
    problem = make_problem(12, 3, 12, seed=1, num_stages=3)
    plan = make_plan(problem)
    again = priced(plan, slower(problem, 3.0))
    assert 2.0 < again.predicted_seconds / plan.predicted_seconds <= 3.0
    assert [stage.blocks for stage in again.stages] == [stage.blocks for stage in plan.stages]
