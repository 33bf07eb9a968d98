"""Several stages a rank: chosen where they pay, within memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import LinkCost, Profile
from tests.planner.cases import constrained, loading_complaint, make_problem, on_cluster
from tests.products import some


def equal_blocks(num_blocks: int, num_ranks: int, count: int, overhead: float = 5e-5, **more: Any) -> Problem:
    """Blocks of 1 and 2 ms, one after another, each rank for itself."""
    problem = make_problem(num_blocks, num_ranks, count, num_micro_batches=count, num_replicas=1, **more)
    cost = replace(problem.profile.costs[0][0], forward_seconds=1e-3, backward_seconds=2e-3)
    profile = Profile(problem.graph.fingerprint, "test", (1,), ((cost,) * num_blocks,))
    return on_cluster(replace(problem, profile=profile), overhead_seconds=overhead)


def stages_per_rank(plan: Plan) -> int:
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    return max(ranks.count(rank) for rank in ranks)


@pytest.mark.parametrize("case", some([(4, 1, 1.25), (4, 2, 1.1), (4, 4, 1.05), (8, 1, 1.25)], 2))
def test_they_shorten_a_step_of_few_micro_batches(case: tuple[int, int, float]) -> None:
    num_ranks, rounds, gain = case
    problem = equal_blocks(32, num_ranks, num_ranks * rounds)
    plan, one = make_plan(problem), make_plan(constrained(problem, max_stages_per_rank=1))
    assert stages_per_rank(one) == 1 < stages_per_rank(plan) <= 4
    assert one.predicted_seconds > gain * plan.predicted_seconds
    assert plan.bound_seconds <= plan.predicted_seconds
    assert "with one stage a rank no plan takes less" in plan.bound_proof
    num_acts = sum(len(row) for row in RankOrders(plan, problem.graph).planned)
    assert num_acts == 2 * plan.num_stages * plan.num_micro_batches


def test_more_of_them_pay_where_ranks_are_many_within_a_setting_and_none_where_stages_are_tiny_or_links_slow() -> None:
    """A pipeline of many ranks is long to fill, so that more than four stages a rank are worth their messages."""
    assert 4 < stages_per_rank(make_plan(equal_blocks(136, 17, 17))) <= 8
    for most in (1, 2, 3):
        assert stages_per_rank(make_plan(equal_blocks(32, 4, 4, max_stages_per_rank=most))) <= most
    for more in ({"overhead": 0.05}, {"link": LinkCost(0.1, 1e9)}):
        assert stages_per_rank(make_plan(equal_blocks(16, 4, 4, **more))) == 1


def test_the_stages_of_a_rank_share_its_process() -> None:
    """What a process holds beside tensors counts once, in the search and for a plan that is read from a file."""
    process = 1e6
    problem = equal_blocks(12, 2, 4, num_stages=4)
    used = [sum(s.memory_bytes for s in make_plan(problem).stages if rank in s.ranks) for rank in range(2)]
    own = tuple(1.001 * max(used) for _ in used)
    limits = tuple(each + process for each in own)
    alone = make_plan(on_cluster(problem, memory_bytes=own))
    plan = make_plan(on_cluster(problem, memory_bytes=limits, process_bytes=process))
    assert plan.predicted_seconds <= alone.predicted_seconds and max(plan.rank_bytes()) <= max(limits)
    assert not loading_complaint(plan, problem, (each - process for each in limits))
    assert loading_complaint(plan, problem, (0.99 * (each - process) for each in plan.rank_bytes()))
