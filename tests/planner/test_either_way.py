"""Plans that compute weight gradients apart from backward: bounded, chosen where they are faster, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.deployment import Fingerprint, deployment_of, load, plan_from, save
from autovaruna.planner.prediction import RankOrders, pipeline_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from autovaruna.schedule.check import check
from autovaruna.schedule.pipeline import Kind
from tests.planner.cases import constrained, make_problem, make_split


def pipelined(share: float = 0.5, added: float = 0.0, **more: Any) -> Problem:
    """Eight blocks on four ranks, one stage each, with a share of weight gradients in each backward."""
    problem = make_problem(8, 4, 16, num_stages=4, num_micro_batches=8, **more)
    return make_split(problem, random.Random(0), share, added)


def test_a_split_backward_is_chosen_where_it_pays_runs_as_the_rules_say_and_is_kept(tmp_path: Path) -> None:
    problem = pipelined(0.5)
    plan, plain = make_plan(problem), make_plan(constrained(problem, schedule="1f1b"))
    assert (plan.schedule, plain.schedule) == ("zero_bubble", "1f1b")
    assert plan.predicted_seconds < 0.9 * plain.predicted_seconds
    assert plan.bound_seconds <= plan.predicted_seconds
    schedule = RankOrders(plan, problem.graph).planned
    check(schedule, pipeline_of(plan, problem.graph))
    assert sum(act.kind is Kind.WEIGHT for row in schedule for act in row) == 4 * 8
    valid_for = Fingerprint("g", {}, 4, (4,), "cpu", (1e12,) * 4, {})
    save(tmp_path / "plan.json", deployment_of(plan, problem.graph, valid_for))
    assert plan_from(load(tmp_path / "plan.json"), problem.graph) == plan


def test_it_is_not_chosen_where_it_cannot_pay_and_forced_it_says_what_to_do() -> None:
    for problem in (
        pipelined(0.5, added=0.1),
        make_split(make_problem(8, 4, 16, num_stages=1), random.Random(0), 0.5),
        make_problem(8, 4, 16, num_stages=4),
        pipelined(0.5, may_split=False),
        replace(pipelined(0.5), needs_gradient=False),
    ):
        assert make_plan(problem).schedule != "zero_bubble"
    with pytest.raises(PlanError, match="compile_stages=False"):
        make_plan(pipelined(may_split=False, schedule="zero_bubble"))


def test_what_is_deferred_is_within_the_memory_of_every_rank() -> None:
    """A tighter limit defers less, and each micro-batch that is deferred is counted."""
    free = make_plan(pipelined(schedule="zero_bubble"))
    assert all(stage.deferred == 8 for stage in free.stages)
    limit = max(stage.memory_bytes for stage in free.stages)
    for share in (0.9, 0.8, 0.7):
        tight = make_plan(pipelined(memory_bytes=limit * share, schedule="zero_bubble"))
        assert max(tight.rank_bytes()) <= limit * share
        assert sum(stage.deferred for stage in tight.stages) < sum(stage.deferred for stage in free.stages)
        assert tight.predicted_seconds >= free.predicted_seconds
        if share == 0.8:  # a stage with all its micro-batches in flight, which may defer some, does not do both at once
            assert max(stage.memory_bytes for stage in tight.stages) > limit * share
            assert tight.predicted_seconds == pytest.approx(free.predicted_seconds)


def test_what_recompute_leaves_free_is_for_deferring() -> None:
    limit = 830e3
    candidate = Candidate((0, 2, 3, 6), ((0,), (1,), (2,), (3,)), 8, schedule="zero_bubble")
    problem = pipelined(in_flight=4, memory_bytes=limit, schedule="zero_bubble")
    plan = Planner(problem, RangeTables(problem.graph, range(9))).build(candidate)
    assert plan and max(plan.rank_bytes()) <= limit
    assert [stage.deferred for stage in plan.stages if stage.needs_recompute] == [2]
