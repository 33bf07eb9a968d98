"""Lists every plan of small problems: all cuts, ranks, micro-batches, depths and schedules, simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.bound import bound_of_all
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.prediction import policy_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.simulator import simulate
from tests.planner.cases import make_problem

SLOW = LinkCost(2e-3, 1e6)
Ranks = tuple[tuple[int, ...], ...]
ONE_A_RANK = ("1f1b", "varuna", "gpipe")
INTERLEAVED = ("1f1b", "varuna", "gpipe", "interleaved", "deepest_first")


def orders(problem: Problem, num_stages: int, *, is_ordered: bool) -> Iterator[Ranks]:
    """All replica counts, with the ranks in their order or in any; one order of ranks that are alike stands for all."""
    cluster, num_ranks = problem.cluster, problem.cluster.num_ranks
    kinds = list(zip(cluster.hosts, cluster.speeds, cluster.memory_bytes, strict=True))
    known: dict[object, Ranks] = {}
    for ends in combinations(range(1, num_ranks + 1), num_stages):
        for order in [tuple(range(num_ranks))] if is_ordered else permutations(range(num_ranks), ends[-1]):
            ranks = tuple(order[a:b] for a, b in zip((0, *ends), ends, strict=False))
            alike = ranks if is_ordered else tuple(tuple(kinds[rank] for rank in stage) for stage in ranks)
            known.setdefault(alike, ranks)
    yield from known.values()


def patterns(num_groups: int, most_stages: int) -> Iterator[tuple[int, ...]]:
    """All orders of groups that hold one or two stages each, neighbours apart; groups come first in their order."""

    def extend(pattern: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        known = len(set(pattern))
        if known == num_groups and len(pattern) > num_groups:
            yield pattern
        if len(pattern) < most_stages:
            for group in range(min(known + 1, num_groups)):
                if pattern[-1:] != (group,) and pattern.count(group) < 2:
                    yield from extend((*pattern, group))

    return extend(())


def candidates(problem: Problem, *, is_ordered: bool, most_each: int = 1) -> Iterator[Candidate]:
    """All cuts, ranks and micro-batches with one stage a rank; if `most_each` is 2, also those with two on some."""
    n, num_ranks = len(problem.graph.blocks), problem.cluster.num_ranks
    stage_ranks = [
        ranks
        for num_stages in range(1, min(n, num_ranks) + 1)
        for ranks in orders(problem, num_stages, is_ordered=is_ordered)
    ]
    for num_groups in range(2, num_ranks + 1) if most_each > 1 else ():
        for groups in orders(problem, num_groups, is_ordered=is_ordered):
            stage_ranks += [tuple(groups[group] for group in pattern) for pattern in patterns(num_groups, n)]
    for count, ranks in product(micro_batch_counts(problem), stage_ranks):
        for inner in combinations(range(1, n), len(ranks) - 1):
            yield Candidate((0, *inner), ranks, count)


def every_plan(
    problem: Problem, *, is_ordered: bool = True, schedules: Sequence[str] = ONE_A_RANK, most_each: int = 1
) -> Iterator[Plan]:
    """All plans on the ranks in their order or in any order, with their predicted seconds."""
    planner = Planner(problem, RangeTables(problem.graph, range(len(problem.graph.blocks) + 1)))
    for candidate in candidates(problem, is_ordered=is_ordered, most_each=most_each):
        yield from _variants(planner, candidate, INTERLEAVED if candidate.is_interleaved else schedules)


def _variants(planner: Planner, candidate: Candidate, schedules: Sequence[str]) -> Iterator[Plan]:
    known: list[tuple[str, tuple[StagePlan, ...]]] = []
    for depth, schedule in product(("textbook", "latency"), schedules):
        if schedule == "gpipe" and planner.problem.constraints.in_flight:
            continue
        built = planner.build(replace(candidate, depth=depth, schedule=schedule))
        if built and (schedule, built.stages) not in known:
            known.append((schedule, built.stages))
            seconds = simulate(planner.pipeline(built), policy_of(schedule)).step_seconds
            yield replace(built, predicted_seconds=seconds)


def assert_near_the_best(problem: Problem, *, is_ordered: bool, most_each: int = 1) -> None:
    """Holds that the search misses no plan by a hundredth, and that no plan beats a bound."""
    tables = RangeTables(problem.graph, range(len(problem.graph.blocks) + 1))
    least = {count: bound_of_all(SizedProblem(problem, tables, count)) for count in micro_batch_counts(problem)}
    best = math.inf
    for plan in every_plan(problem, is_ordered=is_ordered, most_each=most_each):
        assert least[plan.num_micro_batches] <= plan.predicted_seconds, (problem, plan)
        best = min(best, plan.predicted_seconds)
    if best < math.inf:
        plan = make_plan(problem)
        assert plan.predicted_seconds <= best * 1.01, (problem, plan)
        assert 0 < plan.bound_seconds <= min(best, plan.predicted_seconds), (problem, plan)
    elif most_each == 1:  # else stages may fit that are not at their depths all at the same time
        with pytest.raises(PlanError, match="missing"):
            make_plan(problem)


def small_problem(seed: int) -> Problem:
    """A few blocks, some loosely joined, on up to three equal ranks with much or little memory."""
    rng = random.Random(seed)
    sizes = rng.randint(1, 5), rng.randint(1, 3), rng.randint(3, 6)
    shape = {"skips": rng.randint(0, 3), "tied": rng.randint(0, 1), "loose": rng.random() < 0.4}
    link, memory_bytes = rng.choice([LinkCost(1e-5, 1e10), SLOW]), rng.choice([1e12, 2.0e6, 1.2e6, 8e5])
    return make_problem(*sizes, seed, **shape, link=link, memory_bytes=memory_bytes)
