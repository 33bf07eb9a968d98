"""Holds the table of choices: every even grid once, fastest first, in bounded time."""

from __future__ import annotations

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.grids import Choice, grids_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan, plan_and_choices
from tests.planner.cases import make_problem


def plan_choices(problem: Problem) -> list[Choice]:
    return plan_and_choices(problem)[1]


def test_every_grid_is_listed_once_and_the_fastest_is_first() -> None:
    problem = make_problem(6, 4, 8)
    choices = plan_choices(problem)
    keys = [(choice.num_stages, choice.num_replicas, choice.micro_batch_size) for choice in choices]
    assert {key[:2] for key in keys} == {(1, 4), (2, 2), (3, 1), (4, 1)} and len(set(keys)) == len(keys)
    assert [choice.step_seconds for choice in choices] == sorted(choice.step_seconds for choice in choices)
    assert make_plan(problem).predicted_seconds <= choices[0].step_seconds * 1.0001


def test_each_choice_is_what_the_planner_makes_of_it() -> None:
    for choice in plan_choices(make_problem(6, 4, 8)):
        plan = choice.plan
        assert plan.num_stages == choice.num_stages
        assert {len(stage.ranks) for stage in plan.stages} == {choice.num_replicas}
        assert choice.micro_batch_size == -(-8 // plan.num_micro_batches)
        assert choice.samples_per_second == pytest.approx(8 / plan.predicted_seconds)
        assert choice.memory_bytes == max(stage.memory_bytes for stage in plan.stages)


def test_what_the_user_decided_stays_decided() -> None:
    choices = plan_choices(make_problem(6, 4, 8, num_stages=2, num_micro_batches=4))
    assert [(choice.num_stages, choice.plan.num_micro_batches) for choice in choices] == [(2, 4)]


def test_choices_that_do_not_fit_are_left_out_and_none_is_an_error() -> None:
    everything = plan_choices(make_problem(6, 4, 8))
    limit = sorted(choice.memory_bytes for choice in everything)[len(everything) // 2]
    fitting = plan_choices(make_problem(6, 4, 8, memory_bytes=limit))
    assert fitting and all(choice.memory_bytes <= limit for choice in fitting)
    with pytest.raises(PlanError, match="fits into memory"):
        plan_choices(make_problem(6, 4, 8, memory_bytes=1.0))


def test_of_many_ranks_all_grids_that_leave_none_over_are_choices() -> None:
    """96 ranks: the 24 that are spread evenly in ratio have no 16, and no 48."""
    grids = {grid[:2] for grid in grids_of(make_problem(60, 96, 96), 60)}
    assert {stages for stages, _ in grids} >= {stages for stages in range(1, 61) if 96 % stages == 0}
    assert len(grids) < 35
