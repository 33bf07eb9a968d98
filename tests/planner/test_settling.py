"""A plan fits the limit by the figure that is shown, and saves no memory that its instructions do not need."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.deployment import Fingerprint, memory_complaint
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from tests.planner.cases import make_problem
from tests.products import some


@cache
def tight(seed: int, share: float) -> tuple[Problem, Plan]:
    """A problem with several stages a rank, whose ranks have a share of what the best plan would take; and its plan."""
    chance = random.Random(seed)
    blocks, ranks = chance.randint(6, 12), chance.randint(2, 3)
    stages = chance.choice([0, 2 * ranks])
    problem = make_problem(blocks, ranks, 12, seed=seed, num_stages=stages, max_stages_per_rank=2)
    limit = share * max(make_plan(problem).rank_bytes())
    problem = replace(problem, cluster=replace(problem.cluster, memory_bytes=(limit,) * ranks))
    return problem, make_plan(problem)


@pytest.mark.parametrize(("seed", "share"), some([(4, 0.7), (3, 0.9), (1, 0.8), (8, 0.8), (11, 0.7)], 2))
def test_what_is_shown_of_a_rank_is_within_its_limit(seed: int, share: float) -> None:
    problem, plan = tight(seed, share)
    assert max(plan.rank_bytes()) <= problem.cluster.memory_bytes[0]


def test_what_was_chosen_by_its_instructions_is_not_refused_when_it_is_loaded() -> None:
    problem, plan = tight(8, 0.8)
    limits = problem.cluster.memory_bytes
    assert any(x > limit for x, limit in zip(replace(plan, rank_memory_bytes=()).rank_bytes(), limits, strict=True))
    told = {"optimizer_bytes_factor": problem.optimizer_bytes_factor}
    valid_for = Fingerprint(problem.graph.fingerprint, num_ranks=plan.num_ranks, memory_bytes=limits, settings=told)
    assert not memory_complaint(plan, valid_for, problem.graph)
    less = tuple(0.9 * max(plan.rank_bytes()) for _ in limits)
    assert "need" in memory_complaint(plan, replace(valid_for, memory_bytes=less), problem.graph)


def test_more_stages_than_ranks_that_do_not_fit_are_explained() -> None:
    with pytest.raises(PlanError, match="no plan fits into memory"):
        make_plan(make_problem(8, 3, 12, num_stages=6, max_stages_per_rank=2, memory_bytes=2e4))
