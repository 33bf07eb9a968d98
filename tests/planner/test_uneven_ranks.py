"""Stages on uneven ranks and hosts: where they lie, and that no other assignment of ranks is better."""

from __future__ import annotations

from typing import Any

import pytest

from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import layouts
from autovaruna.profiler.records import LinkCost
from tests.planner.brute import assert_near_the_best
from tests.planner.cases import make_problem, on_cluster
from tests.products import some


def on_hosts(problem: Problem, hosts: str, **more: Any) -> Problem:
    return on_cluster(problem, hosts=tuple(hosts), **{"remote_link": LinkCost(1e-3, 1e7), **more})


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab"])
@pytest.mark.parametrize("reduce", [1e10, 1e6])
def test_near_the_best_of_all_assignments_on_hosts(hosts: str, reduce: float) -> None:
    problem = make_problem(4, 4, 8, num_micro_batches=4)
    assert_near_the_best(on_hosts(problem, hosts, all_reduce_bytes_per_second=reduce), is_ordered=False)


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
