"""Plans of small problems that no rule for depths makes good, or makes fit, are tuned if their stages may be better."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner import hopes, search
from autovaruna.planner.bounds.proof import PROVEN
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.planner.settling import excess_bytes
from autovaruna.planner.tuning import Tuning
from tests.planner.by_rules import leave_hopes
from tests.planner.cases import make_problem
from tests.planner.draws import draw, with_memory


def tight(seed: int, share: float) -> Problem:
    """Three stages on two ranks with heaps, which have a share of what the best plan would take."""
    dice = random.Random(seed)
    num_blocks, count, depth = dice.randint(3, 5), dice.randint(1, 2), dice.choice([0, 2])
    problem = make_problem(
        num_blocks, 2, 2, seed, max_stages_per_rank=2, num_stages=3, num_micro_batches=count, in_flight=depth, skips=1
    )
    problem = replace(problem, cluster=replace(problem.cluster, heap_share=0.2))
    return with_memory(problem, share * max(make_plan(problem).rank_bytes()))


def test_a_mixture_of_depths_and_recompute_makes_other_cuts_and_ranks_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw(12, "1f1b", 2)
    plan = make_plan(problem)
    leave_hopes(monkeypatch)
    assert plan.bound_seconds <= plan.predicted_seconds < 0.97 * make_plan(problem).predicted_seconds


def within_limits(problem: Problem) -> float:
    """The seconds of the plan, infinite if none fits."""
    try:
        plan = make_plan(problem)
    except PlanError:
        return math.inf
    assert all(used <= limit for used, limit in zip(plan.rank_bytes(), problem.cluster.memory_bytes, strict=True))
    return plan.predicted_seconds


def test_what_fits_by_no_rule_may_fit_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [tight(seed, 0.95) for seed in (46, 54, 108, 125, 150, 178, 190, 213)]
    tuned = [within_limits(problem) for problem in problems]
    leave_hopes(monkeypatch)
    by_rule = [within_limits(problem) for problem in problems]
    assert all(one <= other for one, other in zip(tuned, by_rule, strict=True))
    assert sum(map(math.isinf, by_rule)) >= sum(map(math.isinf, tuned)) + 3


def test_what_is_faster_and_lacks_memory_at_first_is_made_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [tight(seed, 0.95) for seed in (84, 133, 227, 376)]
    tuned = [within_limits(problem) for problem in problems]
    leave_hopes(monkeypatch)
    by_rule = [within_limits(problem) for problem in problems]
    assert all(one <= other for one, other in zip(tuned, by_rule, strict=True))
    assert any(one < 0.95 * other < math.inf for one, other in zip(tuned, by_rule, strict=True))


def test_other_depths_may_fit_in_another_order_alone() -> None:
    assert math.isfinite(within_limits(tight(255, 0.95)))


def test_that_a_plan_does_not_fit_is_known_from_the_first_rank_that_lacks_memory() -> None:
    for seed in range(6):
        problem = tight(seed, 0.95)
        tables = RangeTables(problem.graph, range(len(problem.graph.blocks) + 1))
        candidate = Candidate((0, 1), ((0,), (1,)), problem.constraints.num_micro_batches)
        planners = [Planner(problem, tables) for _ in range(2)]
        plan = planners[0].build(candidate, (math.inf, math.inf))
        assert plan is not None
        needed = planners[0].predict_whole(plan).rank_bytes()
        assert planners[0].predict_whole(plan, needed).rank_bytes() == needed
        for limits in ((needed[0] * 0.99, math.inf), (math.inf, needed[1] * 0.99), (0.0, 0.0)):
            found = planners[1].predict_whole(plan, limits).rank_bytes()
            assert any(used > limit for used, limit in zip(found, limits, strict=True))
            assert all(used <= more * (1 + 1e-9) for used, more in zip(found, needed, strict=True))
    assert _followed(problem, plan, (0.0, 0.0)) < _followed(problem, plan, ())


def _followed(problem: Problem, plan: Plan, limits: Sequence[float]) -> int:
    """How many instructions are followed to know the memory of a plan."""
    planner = Planner(problem, RangeTables(problem.graph, range(len(problem.graph.blocks) + 1)))
    planner.predict_whole(plan, limits)
    return planner.known.num_followed


Heard = list[tuple[list[hopes.Hopeful], float]]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """All hopes that there were, and the seconds that they had to beat."""
    calls: Heard = []

    def hear(hopeful: Sequence[hopes.Hopeful], least_seconds: float) -> None:
        calls.append((list(hopeful), least_seconds))

    monkeypatch.setattr(search, "tuned_hopes", hear)
    return calls


def test_hopes_that_memory_keeps_from_being_better_never_become_better(heard: Heard) -> None:
    make_plan(draw(68, "1f1b"))
    hopeful, least = heard[-1]
    least *= 1.2
    left = [_place(hope) for hope in hopes._within_memory(hopeful, least)]
    loose = [hope for hope in hopeful if hopes._least_seconds(hope) < least * PROVEN]
    out = [hope[1] for hope in loose if _place(hope) not in left]
    assert out
    for planner, candidate, plan in out:
        tuning = Tuning(planner, candidate, plan, planner.spent_seconds + 10.0, least)
        found = tuning.run() or tuning.settled
        assert found is None or found.predicted_seconds >= least * PROVEN


def _place(hope: hopes.Hopeful) -> object:
    candidate = hope[1][1]
    return candidate.starts, candidate.ranks, candidate.num_micro_batches


def test_what_is_better_as_it_is_comes_first(heard: Heard) -> None:
    make_plan(draw(9, "1f1b"))
    hopeful, least = heard[-1]
    least *= 1.2
    some = hopes._within_memory(hopeful, least)
    ordered = hopes._better_first(some, least, {id(found[0]): math.inf for _, found in some})
    is_better = []
    for _, (planner, _, plan) in ordered:
        whole = planner.predict_whole(plan)
        is_better.append(whole.predicted_seconds < least and not excess_bytes(planner, whole))
    assert any(is_better)
    assert not all(is_better)
    assert is_better == sorted(is_better, reverse=True)
    assert [hopes._least_seconds(hope) for hope in some] == sorted(map(hopes._least_seconds, ordered))
