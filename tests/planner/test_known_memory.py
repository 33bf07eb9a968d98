"""A search follows the heap of a rank once, however many of its plans have it; what it knows is what is there."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.memory import holes
from autovaruna.planner.memory.chances import CHANCES
from autovaruna.planner.memory.heap import Heap
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import Plan
from tests.planner.brute import in_order
from tests.planner.cases import make_problem, make_uneven


def drawn(seed: int) -> Problem:
    problem = make_uneven(make_problem(4, 3, 4, seed, skips=1), random.Random(seed), 1 + seed % 2)
    return replace(problem, cluster=replace(problem.cluster, heap_share=0.2), min_micro_batches_for_inputs=1 + seed % 2)


def planner_of(problem: Problem) -> Planner:
    return Planner(problem, RangeTables(problem.graph, range(len(problem.graph.blocks) + 1)))


def some_plans(problem: Problem) -> list[Plan]:
    planner, cuts = planner_of(problem), ((), (1,), (2,), (1, 2), (1, 3), (2, 3))
    candidates = [Candidate((0, *inner), ranks, 4) for inner in cuts for ranks in in_order(3, len(inner) + 1)]
    return [plan for plan in map(planner.build, candidates) if plan]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_known_is_what_is_there(seed: int) -> None:
    problem = drawn(seed)
    planner = planner_of(problem)
    for plan in some_plans(problem):
        assert planner.predict_whole(plan).rank_bytes() == planner_of(problem).predict_whole(plan).rank_bytes()


def test_no_heap_is_followed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    follow, followed = holes.heap_of_steps, Counter[object]()

    def counted(program, stages, *rest) -> Heap:  # type: ignore[no-untyped-def]
        num_blocks = tuple((stage, len(tensors.blocks)) for stage, tensors in stages.items())
        followed[tuple(program), num_blocks, repr(tuple(stages.values())), repr(rest)] += 1
        return follow(program, stages, *rest)

    monkeypatch.setattr(holes, "heap_of_steps", counted)
    problem = drawn(0)
    planner, plans = planner_of(problem), some_plans(problem)
    for plan in plans:
        planner.predict_whole(plan)
    assert max(followed.values()) == 1
    assert len(followed) < 0.8 * len(CHANCES) * sum(len(stage.ranks) for plan in plans for stage in plan.stages)


def test_a_heap_that_is_known_hardly_counts() -> None:
    problem = drawn(0)
    planner, plan = planner_of(problem), some_plans(problem)[-1]
    spent = [planner.spent_seconds]
    for _ in range(2):
        planner.predict_whole(plan)
        spent.append(planner.spent_seconds)
    assert spent[1] - spent[0] > 3 * (spent[2] - spent[1]) > 0
