"""The bound lies below every plan there is, whatever memory, speeds, hosts, links and settings.

Forwards that memory does not hold until a first backward run again, or ranks are idle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autovaruna.planner import range_bounds
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import SPLIT_SCHEDULE, Problem
from autovaruna.planner.proof import bound_of_all, lost_seconds, step_bound
from autovaruna.planner.range_tables import RangeTables
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from autovaruna.profiler.records import LinkCost, OptimizerCost, Profile
from tests.planner.brute import every_plan, small_problem
from tests.planner.cases import make_problem, make_split, make_uneven
from tests.products import some


def bounds(problem: Problem, positions: Sequence[int] = ()) -> dict[int, float]:
    tables = RangeTables(problem.graph, positions or range(len(problem.graph.blocks) + 1))
    is_split = problem.constraints.schedule == SPLIT_SCHEDULE
    each = [SizedProblem(problem, tables, m, is_split) for m in micro_batch_counts(problem)]
    return {sized.num_micro_batches: step_bound(sized) for sized in each}


def forced(problem: Problem, dice: random.Random) -> Problem:
    """The problem with a random choice that the user has already made."""
    choice = dice.choice([{}, {}, {"recompute": "all"}, {"recompute": "none"}, {"in_flight": dice.randint(1, 2)}])
    return replace(problem, constraints=replace(problem.constraints, **choice))


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
    if "split" in kind:
        constraints = replace(problem.constraints, schedule="zero_bubble")
        return replace(make_split(problem, dice), constraints=constraints), ()
    problem, n = forced(problem, dice), len(problem.graph.blocks)
    inner = sorted(dice.sample(range(1, n), dice.randint(0, max(n - 2, 0)))) if kind == "segments" and n > 1 else []
    return problem, [0, *inner, n] if kind == "segments" else ()


@pytest.mark.parametrize("kind", ["forced", "segments", "counters", "sharing", "split", "many", "many split"])
@pytest.mark.parametrize("start", some(range(0, 160, 40), 2))
def test_no_plan_beats_it(kind: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments have cuts inside, counters are blocks that need nothing; of many ranks the bound knows less."""
    monkeypatch.setattr(range_bounds, "_FEW_RANKS", 0 if "many" in kind else 16)
    for seed in range(start, start + (8 if kind == "counters" else 40)):
        problem, positions = drawn(kind, seed)
        least = bounds(problem, positions)
        schedules = ("zero_bubble",) if "split" in kind else ("1f1b", "varuna", "gpipe")
        is_ordered = kind not in ("forced", "sharing", "split")
        for plan in every_plan(problem, is_ordered=is_ordered, schedules=schedules):
            assert least[plan.num_micro_batches] <= plan.predicted_seconds, (seed, positions, plan)


def test_blocks_that_need_nothing_hide_no_wait() -> None:
    """Counters of BatchNorm stood first in stages, and the bound took it that nothing was waited for."""
    for seed in some(range(4), 2):
        problem = with_counters(make_problem(12, 3, 8, seed, num_stages=3, num_replicas=1, max_stages_per_rank=1))
        assert make_plan(problem).gap < 0.08


def test_memory_is_known_where_cuts_may_lie_inside_of_segments() -> None:
    """The whole model on each rank would be fastest, and does not fit."""
    ample = make_problem(24, 3, 12)
    trained = sum(parameter.num_bytes for parameter in ample.graph.parameters)
    tight = make_problem(24, 3, 12, memory_bytes=2.4 * trained)  # of 4: weights, gradients, the optimizer's two
    least = [min(bounds(problem, range(0, 25, 2)).values()) for problem in (ample, tight)]
    assert least[1] > 1.02 * least[0]


def test_plans_short_of_memory_are_known_to_be_slow() -> None:
    """Where memory leaves one micro-batch in flight, ranks wait for each other, and the bound knows."""
    for memory_bytes, gap in ((1e12, 0.05), (1.1e6, 0.15)):
        problem = make_problem(8, 4, 32, memory_bytes=memory_bytes, num_stages=4, recompute="none")
        assert make_plan(problem).gap < gap


@pytest.mark.parametrize("cuts", [("layers.1", "layers.3"), ("layers.2",)])
def test_forced_cuts_are_charged_as_they_are(cuts: tuple[str, ...]) -> None:
    problem = make_problem(8, 3, 12, cuts=cuts, num_replicas=1)
    assert make_plan(problem).gap < 0.05


CHOICES = ({"recompute": "none"}, {"num_replicas": 1}, {"num_replicas": 1, "recompute": "none"}, {})


def sized(problem: Problem) -> SizedProblem:
    tables = RangeTables(problem.graph, range(len(problem.graph.blocks) + 1))
    return SizedProblem(problem, tables, problem.constraints.num_micro_batches)


def state_bytes(problem: Problem) -> float:
    return (1.0 + problem.optimizer_bytes_factor) * sum(each.num_bytes for each in problem.graph.parameters)


def tight(seed: int) -> Problem:
    """A few blocks that keep much, on ranks with room for some of it."""
    dice = random.Random(seed)
    num_ranks, count, skips = dice.randint(2, 3), dice.choice([2, 3, 4]), dice.choice([0, 0, 2])
    more = {"num_micro_batches": count, **dice.choice(CHOICES)}
    problem = make_problem(dice.randint(2, 4), num_ranks, count, seed, skips=skips, link=LinkCost(1e-7, 1e12), **more)
    costs = tuple(
        tuple(replace(cost, saved_bytes=200 * cost.saved_bytes) for cost in row) for row in problem.profile.costs
    )
    saved = sum(cost.saved_bytes for cost in costs[0])
    limit = state_bytes(problem) * dice.choice([0.7, 0.9]) + dice.uniform(0.2, 0.7) * saved
    cluster = replace(problem.cluster, memory_bytes=(limit,) * num_ranks)
    problem = replace(problem, profile=replace(problem.profile, costs=costs), cluster=cluster)
    return make_uneven(problem, dice, dice.randint(1, 2)) if dice.random() < 0.2 else problem


@pytest.mark.parametrize("start", [0, 40])
def test_no_plan_beats_what_memory_has_all_plans_lose(start: int) -> None:
    num_bound = 0
    for seed in range(start, start + 40):
        problem = tight(seed)
        at_count = sized(problem)
        least = bound_of_all(at_count)
        num_bound += lost_seconds(at_count) > 0
        for plan in every_plan(problem, most_each=2):
            assert least <= plan.predicted_seconds, (seed, plan)
    assert num_bound > 10


def equal(memory_bytes: float, **more: object) -> Problem:
    """Blocks of 1 and 2 ms on 4 ranks, that keep 1 MB of each of 8 micro-batches."""
    problem = make_problem(8, 4, 8, num_micro_batches=8, num_replicas=1, memory_bytes=memory_bytes, **more)
    cost = replace(
        problem.profile.costs[0][0], forward_seconds=1e-3, backward_seconds=2e-3, saved_bytes=1e6, work_bytes=0
    )
    return replace(problem, profile=Profile(problem.graph.fingerprint, "test", (1,), ((cost,) * 8,)))


def test_it_is_what_there_is_no_room_for() -> None:
    """Four ranks run 32 forwards of a block until a first backward can come, and have room for 24 of these."""
    state = state_bytes(equal(1e12))
    limit = (state + 24e6) / 4
    assert lost_seconds(sized(equal(limit, recompute="none"))) == pytest.approx(8e-3)
    assert lost_seconds(sized(equal(limit))) == pytest.approx(8e-3 * 8 / 9)  # One may be recomputed ahead of time.
    assert lost_seconds(sized(equal((state + 32e6) / 4))) == pytest.approx(0.0, abs=1e-9)


def test_a_plan_says_so() -> None:
    problem = equal((state_bytes(equal(1e12)) + 40e6) / 4)
    costs = tuple(tuple(replace(cost, saved_bytes=3e6) for cost in row) for row in problem.profile.costs)
    plan = make_plan(replace(problem, profile=replace(problem.profile, costs=costs)))
    assert plan.bound_seconds > 1.02 * 8 * 24e-3 / 4
    assert "memory does not hold all forwards" in plan.bound_proof
