"""Where stages lie: on uneven ranks and hosts, as no other assignment is better, several on a rank where they pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import layouts
from autovaruna.profiler.records import LinkCost, Profile
from tests.planner.brute import better_plan
from tests.planner.cases import constrained, loading_complaint, make_problem, on_cluster
from tests.products import some


def on_hosts(problem: Problem, hosts: str, **more: Any) -> Problem:
    return on_cluster(problem, hosts=tuple(hosts), **{"remote_link": LinkCost(1e-3, 1e7), **more})


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab"])
@pytest.mark.parametrize("reduce", [1e10, 1e6])
def test_near_the_best_of_all_assignments_on_hosts(hosts: str, reduce: float) -> None:
    problem = make_problem(4, 4, 8, num_micro_batches=4, max_stages_per_rank=1)
    assert better_plan(on_hosts(problem, hosts, all_reduce_bytes_per_second=reduce)) is None


def test_replicas_share_a_host_where_all_reduces_are_dear_and_neighbours_where_messages_are() -> None:
    problem = make_problem(8, 4, 8, num_stages=2, num_replicas=2, num_micro_batches=8)
    dear_reduce = make_plan(on_hosts(problem, "abab", all_reduce_bytes_per_second=1e6))
    assert {stage.ranks for stage in dear_reduce.stages} == {(0, 2), (1, 3)}
    dear_message = on_hosts(problem, "abab", all_reduce_bytes_per_second=1e12)
    first, last = make_plan(dear_message).stages
    assert all((one - other) % 2 == 0 for one, other in zip(first.ranks, last.ranks, strict=True))


def test_hosts_hold_groups_of_replicas_of_neighbouring_stages() -> None:
    """Two hosts of six ranks, three stages of four replicas: each host holds two replicas of each stage."""
    problem = on_hosts(make_problem(8, 12, 12), "aaaaaabbbbbb")
    placed = layouts(problem, range(12), (4, 4, 4))
    assert ((0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)) in placed
    assert ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)) in placed
    assert ((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11)) in placed


@pytest.mark.parametrize("most_each", [1, 2])
def test_a_plan_of_few_ranks_stays_on_the_host_that_has_them(most_each: int) -> None:
    """The hosts before it have a rank each, and what leaves a host takes longer than all work."""
    problem = make_problem(32, 4, 16, num_micro_batches=5, max_stages_per_rank=most_each, recompute="none")
    far = on_hosts(problem, "abbc", remote_link=LinkCost(3.0, 1e5), all_reduce_bytes_per_second=1e4)
    assert {rank for stage in make_plan(far).stages for rank in stage.ranks} == {1, 2}


def test_a_slow_rank_holds_the_least_work_wherever_it_is_and_none_where_it_only_holds_up_the_others() -> None:
    for slow in some(range(4), 2):
        speeds = tuple(0.25 if rank == slow else 1.0 for rank in range(4))
        problem = make_problem(16, 4, 16, num_stages=4, num_replicas=1)
        plan = make_plan(on_cluster(problem, speeds=speeds))
        work = {stage.ranks[0]: stage.forward_seconds + stage.backward_seconds for stage in plan.stages}
        assert min(work, key=work.__getitem__) == slow
    plan = make_plan(on_cluster(make_problem(6, 3, 8), speeds=(1.0, 0.01, 1.0)))
    assert {rank for stage in plan.stages for rank in stage.ranks} == {0, 2}


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_replica_with_one_micro_batch_less_needs_memory_for_fewer(count: int, recompute: str) -> None:
    """Ranks have hardly more than they need, and rank 1 needs less."""
    problem = make_problem(2, 2, count, num_stages=1, num_micro_batches=count, schedule="gpipe", recompute=recompute)
    free = make_plan(problem)
    limits = tuple(1.001 * needed for needed in free.rank_bytes())
    assert limits[1] < free.rank_bytes()[0]
    plan = make_plan(on_cluster(problem, memory_bytes=limits))
    assert plan.stages[0].ranks == free.stages[0].ranks == (0, 1)
    assert plan.bound_seconds <= plan.predicted_seconds == free.predicted_seconds


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
