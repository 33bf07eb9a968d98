"""No plan by rule (equal layers, parameters, FLOPs, or that of RaNNC) is faster than ours."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import LinkCost, OptimizerCost
from tests.planner.cases import make_problem, with_memory
from tests.products import some


@pytest.fixture(scope="module")
def plans() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("plans")


def lopsided(problem: Problem) -> Problem:
    """The first and the last block are as large as all others together."""
    n, graph = len(problem.graph.blocks), problem.graph
    ends = {0, n - 1}
    parameters = tuple(replace(p, num_bytes=p.num_bytes * (n if set(p.blocks) & ends else 1)) for p in graph.parameters)
    cost = OptimizerCost(1e-4, 1e-8)
    return replace(problem, graph=replace(graph, parameters=parameters), optimizer_cost=cost)


@pytest.mark.parametrize(("seed", "share"), some([(seed, share) for seed in range(5) for share in (0.6, 0.0)], 1))
def test_never_slower_than_a_rule(seed: int, share: float, plans: ModuleType) -> None:
    link = LinkCost(1e-5, 1e9) if seed % 2 else LinkCost(2e-4, 1e7)
    problem = make_problem(14, 4, 12, seed, skips=2, tied=1, link=link)
    problem = lopsided(problem) if seed % 3 == 0 else problem
    if share:
        whole = plans.planner_of(problem).build(plans.Candidate((0,), ((0,),), 12))
        problem = with_memory(problem, share * whole.stages[0].memory_bytes)
    ours, others = make_plan(problem), plans.others(problem)
    assert min(others.values()) < float("inf")
    assert all(ours.predicted_seconds <= seconds * 1.0001 for seconds in others.values())
