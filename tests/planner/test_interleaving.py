"""Several stages a rank: chosen where they pay, near the best of all, above a bound that holds for every plan."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.deployment import Fingerprint, memory_complaint
from autovaruna.planner.interleaved import cut_evenly, patterns
from autovaruna.planner.prediction import Orders
from autovaruna.planner.problem import Problem
from autovaruna.planner.proof import bound_of_all
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from autovaruna.profiler.records import LinkCost, Profile
from tests.planner.brute import every_plan, small_problem
from tests.planner.cases import make_problem, make_uneven
from tests.products import some


def equal_blocks(num_blocks: int, num_ranks: int, count: int, overhead: float = 5e-5, **more: object) -> Problem:
    """Blocks of 1 and 2 ms, one after another, each rank for itself."""
    problem = make_problem(num_blocks, num_ranks, count, num_micro_batches=count, num_replicas=1, **more)
    cost = replace(problem.profile.costs[0][0], forward_seconds=1e-3, backward_seconds=2e-3)
    profile = Profile(problem.graph.fingerprint, "test", (1,), ((cost,) * num_blocks,))
    return replace(problem, profile=profile, cluster=replace(problem.cluster, overhead_seconds=overhead))


def at_most(problem: Problem, most: int) -> Problem:
    return replace(problem, constraints=replace(problem.constraints, max_stages_per_rank=most))


def single(problem: Problem) -> Problem:
    return at_most(problem, 1)


def stages_per_rank(plan: Plan) -> int:
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    return max(ranks.count(rank) for rank in ranks)


@pytest.mark.parametrize(
    ("num_ranks", "rounds", "gain"), some([(4, 1, 1.25), (4, 2, 1.1), (4, 4, 1.05), (8, 1, 1.25)], 2)
)
def test_they_shorten_a_step_of_few_micro_batches(num_ranks: int, rounds: int, gain: float) -> None:
    problem = equal_blocks(32, num_ranks, num_ranks * rounds)
    plan, one = make_plan(problem), make_plan(single(problem))
    assert stages_per_rank(one) == 1 < stages_per_rank(plan) <= 4
    assert one.predicted_seconds > gain * plan.predicted_seconds
    assert plan.bound_seconds <= plan.predicted_seconds and "with one stage a rank no plan takes" in plan.bound_proof
    assert sum(len(row) for row in Orders(plan, problem.graph).planned) == 2 * plan.num_stages * plan.num_micro_batches


def test_more_of_them_pay_where_ranks_are_many() -> None:
    """A pipeline of many ranks is long to fill, so that more than four stages a rank are worth their messages."""
    assert 4 < stages_per_rank(make_plan(equal_blocks(136, 17, 17))) <= 8


def test_a_setting_limits_them() -> None:
    problem = equal_blocks(32, 4, 4)
    for most in (1, 2, 3):
        assert stages_per_rank(make_plan(at_most(problem, most))) <= most


def test_tiny_stages_and_slow_links_are_not_worth_it() -> None:
    for more in ({"overhead": 0.05}, {"link": LinkCost(0.1, 1e9)}):
        assert stages_per_rank(make_plan(equal_blocks(16, 4, 4, **more))) == 1  # type: ignore[arg-type]


def test_memory_counts_all_stages_of_a_rank() -> None:
    problem = equal_blocks(24, 3, 6)
    most, least = (max(make_plan(each).rank_bytes()) for each in (problem, single(problem)))
    for limit in (0.99 * most, (most + least) / 2, 1.01 * least):
        assert max(make_plan(equal_blocks(24, 3, 6, memory_bytes=limit)).rank_bytes()) <= limit


@pytest.mark.parametrize("start", some(range(0, 60, 20), 1))
@pytest.mark.parametrize("is_uneven", [False, True], ids=["equal", "uneven"])
def test_no_plan_is_better_by_a_hundredth_and_none_beats_the_bound(start: int, is_uneven: bool) -> None:
    """Against all cuts, ranks and orders of groups, one and two stages a rank, and all numbers of micro-batches."""
    for seed in range(start, start + (10 if is_uneven else 20)):
        problem, dice = small_problem(seed), random.Random(seed * 7 + 1)
        problem = make_uneven(problem, dice, dice.randint(1, 3)) if is_uneven else problem
        plans = list(every_plan(problem, is_ordered=not is_uneven, most_each=2))
        tables = RangeTables(problem.graph, range(len(problem.graph.blocks) + 1))
        least = {count: bound_of_all(SizedProblem(problem, tables, count)) for count in micro_batch_counts(problem)}
        assert all(least[plan.num_micro_batches] <= plan.predicted_seconds for plan in plans), seed
        best = min((plan.predicted_seconds for plan in plans), default=None)
        if best is not None:
            plan = make_plan(problem)
            assert plan.predicted_seconds <= best * 1.01, seed
            assert plan.bound_seconds <= best, seed


def test_patterns_keep_neighbours_apart() -> None:
    for num_groups in range(2, 7):
        for pattern in patterns(num_groups, 3):
            assert set(pattern) == set(range(num_groups))
            assert all(one != other for one, other in pairwise(pattern))
            assert max(pattern.count(group) for group in pattern) in (2, 3)
    assert (0, 1, 2, 1, 0) in patterns(3, 2)
    assert [len(pattern) // 4 for pattern in patterns(4, 8) if len(pattern) > 16] == [6, 8]
    assert [len(pattern) for pattern in patterns(3, 5) if len(pattern) > 12] == [15]
    assert list(patterns(3, 4, 7)) == [(0, 1, 2, 0, 1, 2, 0), (0, 1, 2, 1, 0, 1, 2)]


def test_cuts_are_even_between_groups() -> None:
    """A heavy end leaves its group less of the middle."""
    work = np.ones(60)
    work[-1] = 10.0
    for pattern in patterns(4, 2):
        if pattern.count(0) < 2 or len(pattern) < 8:
            continue
        *_, starts = cut_evenly(work, [1.0] * 4, pattern)
        own = np.add.reduceat(work, list(starts))
        held = [own[[g == group for g in pattern]].sum() for group in range(4)]
        assert max(held) - min(held) <= 3


def test_what_groups_have_gets_ever_more_even() -> None:
    """Cutting all stages anew at once overshot: with layers of some large blocks, cuts got less even."""
    work = np.tile([0.05, 3.0, 0.4, 1.0, 0.05, 4.0, 0.1, 4.0, 0.05], 24)
    for num_groups in (4, 8):
        for pattern in patterns(num_groups, 4):
            uneven = []
            for starts in cut_evenly(work, [1.0] * num_groups, pattern):
                held = np.bincount(pattern, np.add.reduceat(work, list(starts)))
                uneven.append(held.max() / held.mean())
            assert uneven[-1] == min(uneven) < 1.07, (num_groups, pattern, uneven)


def test_the_stages_of_a_rank_share_its_process() -> None:
    """What a process holds beside tensors counts once, in the search and for a plan that is read from a file."""
    process = 1e6
    problem = equal_blocks(12, 2, 4, num_stages=4)
    used = [sum(s.memory_bytes for s in make_plan(problem).stages if rank in s.ranks) for rank in range(2)]
    own = tuple(1.001 * max(used) for _ in used)
    limits = tuple(each + process for each in own)
    alone = make_plan(replace(problem, cluster=replace(problem.cluster, memory_bytes=own)))
    plan = make_plan(replace(problem, cluster=replace(problem.cluster, memory_bytes=limits, process_bytes=process)))
    assert plan.predicted_seconds <= alone.predicted_seconds and max(plan.rank_bytes()) <= max(limits)
    valid_for = Fingerprint(problem.graph.fingerprint, num_ranks=2, memory_bytes=tuple(x - process for x in limits))
    told = {"optimizer_bytes_factor": problem.optimizer_bytes_factor}
    assert not memory_complaint(plan, replace(valid_for, settings=told), problem.graph)
    less = tuple(0.99 * (x - process) for x in plan.rank_bytes())
    assert memory_complaint(plan, replace(valid_for, settings=told, memory_bytes=less), problem.graph)
