"""Stages of the best plans get depths, recompute and deferral of their own; ranks are asked what they need in truth."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner import search
from autovaruna.planner.prediction import pipeline_of, policy_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.schedule.instruction import BACKWARD, FORWARD, Instruction
from autovaruna.schedule.simulator import simulate
from tests.planner.by_rules import leave_found
from tests.planner.draws import draw
from tests.planner.every_depth import any_problem


@pytest.mark.parametrize("seed", [8, 45, 77])
def test_stages_defer_as_much_as_suits_each_of_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw(seed, "zero_bubble")
    plan = make_plan(problem)
    leave_found(monkeypatch)
    assert plan.bound_seconds <= plan.predicted_seconds < 0.97 * make_plan(problem).predicted_seconds


@pytest.mark.parametrize(
    ("kind", "seed", "without"),
    [
        ("split", 80024, "autovaruna.planner.local_search._MOST_TOGETHER"),
        ("split", 80046, "autovaruna.planner.local_search._SHARE_OF_PAIRS"),
        ("shared", 70085, "autovaruna.planner.local_search._SHARE_OF_PAIRS"),
    ],
)
def test_stages_change_together_where_no_change_is_of_use_alone(
    kind: str, seed: int, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = any_problem(kind, seed)
    plan = make_plan(problem)
    monkeypatch.setattr(without, 0)
    assert plan.bound_seconds <= plan.predicted_seconds < 0.99 * make_plan(problem).predicted_seconds


@pytest.mark.parametrize("seed", [5, 76])
def test_stages_of_a_rank_that_never_reach_their_depths_together_fit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = draw(seed, most_each=2)
    plan = make_plan(problem)
    assert all(used <= limit for used, limit in zip(plan.rank_bytes(), problem.cluster.memory_bytes, strict=True))
    leave_found(monkeypatch)
    monkeypatch.setattr(search, "that_fits", lambda planner, candidate, plan: None)
    assert plan.predicted_seconds < 0.97 * make_plan(problem).predicted_seconds


@pytest.mark.parametrize("most_each", [1, 2])
def test_by_an_account_of_its_own_every_rank_has_room(most_each: int) -> None:
    for seed in range(40, 52):
        problem = draw(seed, most_each=most_each)
        try:
            plan = make_plan(problem)
        except PlanError:
            continue
        schedule = simulate(pipeline_of(plan, problem.graph), policy_of(plan.schedule)).schedule
        for rank, shown in enumerate(plan.rank_bytes()):
            needed = _most_held(problem, plan, rank, schedule[rank])
            assert needed <= shown * (1 + 1e-9) <= problem.cluster.memory_bytes[rank] * (1 + 2e-9), (seed, rank)


def _most_held(problem: Problem, plan: Plan, rank: int, instructions: Sequence[Instruction]) -> float:
    """What a rank holds at the least: its state, gradients once made, and of each micro-batch what backward needs."""
    costs = problem.cost_table.at(ceil(plan.micro_batch_size - 1e-9))
    held, each, gradients = 0.0, dict[int, float](), dict[int, float]()
    for number, stage in enumerate(plan.stages):
        if rank in stage.ranks:
            inside = set(stage.blocks)
            own = [p for p in problem.graph.parameters if inside & set(p.blocks)]
            gradients[number] = sum(p.num_bytes for p in own)
            held += gradients[number] * (1.0 + problem.optimizer_bytes_factor)
            saved = 0.0 if stage.needs_recompute else sum(costs.saved_bytes[block] for block in inside)
            come = (v for v in problem.graph.values if v.producer not in inside and inside & set(v.consumers))
            each[number] = saved + sum(v.size.at(int(costs.micro_batch_size)) for v in come)
    most, begun = held, set[int]()
    for act in instructions:
        if act.kind is FORWARD:
            held += each[act.stage]
        if act.kind is BACKWARD:
            held += gradients[act.stage] * (act.stage not in begun) - each[act.stage]
            begun.add(act.stage)
        most = max(most, held)
    return most
