"""Plans that were found are changed by steps; a cut far away may be the only one that is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autovaruna.graph.records import Size, Value
from autovaruna.planner import local_search as climb_module
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import Evaluator
from autovaruna.planner.local_search import improve
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.profiler.records import LinkCost
from tests.planner.cases import make_problem

NUM_BLOCKS = 40


def dear_but_at(places: Sequence[int]) -> Problem:
    """A chain over slow links in which hardly anything crosses at some places, and much at all others."""
    problem = make_problem(NUM_BLOCKS, 2, 1, link=LinkCost(1e-3, 1e6), num_stages=2, num_micro_batches=1)
    sizes = {place: 1e3 if place in places else 1e6 for place in range(1, NUM_BLOCKS)}
    values = tuple(Value(f"v{k}", k - 1, (k,), Size(0, size), True) for k, size in sizes.items())
    return replace(problem, graph=replace(problem.graph, values=values))


def climbed(problem: Problem, start: int) -> tuple[int, ...]:
    """Where the second stage starts after climbing."""
    trials = Evaluator(Planner(problem, RangeTables(problem.graph, range(NUM_BLOCKS + 1))), is_small=False)
    candidate = Candidate((0, start), ((0,), (1,)), 1)
    trials.attempt(candidate, float("inf"))
    assert improve(trials, candidate, 10.0, lambda planner, other: iter(()))
    return trials.best_few(1)[0].starts


def test_a_cut_finds_a_place_that_no_step_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dear_but_at([20])
    assert climbed(problem, 37) == (0, 20)
    monkeypatch.setattr(climb_module, "_MOST_PLACES", 0)
    assert climbed(problem, 37) != (0, 20)


def test_cuts_of_large_problems_move_by_steps() -> None:
    assert list(climb_module._cuts_anywhere(1000, Candidate((0, 500), ((0,), (1,)), 1))) == []
