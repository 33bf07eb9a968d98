"""Lists every plan of small problems: all cuts, ranks, micro-batches, depths, recompute and schedules."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations, product

from autovaruna.errors import PlanError
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.bound import bound_of_all
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.problem import Problem
from autovaruna.planner.rank_memory import Option, is_within
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from autovaruna.planner.several_a_rank import WORTH
from autovaruna.profiler.records import LinkCost
from tests.planner.cases import make_problem
from tests.schedule.pipelines import bound_at_depths

BETTER = 0.99
SLOW = LinkCost(2e-3, 1e6)
Ranks = tuple[tuple[int, ...], ...]
Options = tuple[Option, ...]
ONE_A_RANK = ("1f1b", "varuna", "gpipe")
INTERLEAVED = ("1f1b", "varuna", "gpipe", "interleaved")


def orders(problem: Problem, num_stages: int) -> Iterator[Ranks]:
    """All replica counts, with the ranks in any order; one order of ranks that are alike stands for all."""
    cluster, num_ranks = problem.cluster, problem.cluster.num_ranks
    kinds = list(zip(cluster.hosts, cluster.speeds, cluster.memory_bytes, strict=True))
    known: dict[object, Ranks] = {}
    for ends in combinations(range(1, num_ranks + 1), num_stages):
        for order in permutations(range(num_ranks), ends[-1]):
            ranks = tuple(order[a:b] for a, b in zip((0, *ends), ends, strict=False))
            known.setdefault(tuple(tuple(kinds[rank] for rank in stage) for stage in ranks), ranks)
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


def candidates(problem: Problem) -> Iterator[Candidate]:
    """All cuts, ranks and micro-batches with one stage a rank; if several are allowed, also those with two on some."""
    n, num_ranks = len(problem.graph.blocks), problem.cluster.num_ranks
    num_stages, num_replicas = problem.constraints.num_stages, problem.constraints.num_replicas
    stage_ranks = [ranks for num in range(1, min(n, num_ranks) + 1) for ranks in orders(problem, num)]
    for num_groups in range(2, num_ranks + 1) if problem.constraints.max_stages_per_rank > 1 else ():
        for groups in orders(problem, num_groups):
            stage_ranks += [tuple(groups[group] for group in pattern) for pattern in patterns(num_groups, n)]
    for count, ranks in product(micro_batch_counts(problem), stage_ranks):
        if num_stages in (0, len(ranks)) and all(num_replicas in (0, len(each)) for each in ranks):
            for inner in combinations(range(1, n), len(ranks) - 1):
                yield Candidate((0, *inner), ranks, count)


def seconds_of(plan: Plan) -> float:
    """Returns the seconds by which plans are ordered: several stages a rank have to be worth it."""
    return plan.predicted_seconds / (WORTH if plan.is_shared else 1.0)


class EveryDepth:
    """All plans of a small problem, of which no more than `most_plans` are looked at, those with the least bounds."""

    def __init__(self, problem: Problem, most_plans: int) -> None:
        self.problem, self.left = problem, most_plans
        self.planner = Planner(problem, RangeTables(problem.graph, range(len(problem.graph.blocks) + 1)))

    def better_than(self, seconds: float) -> Plan | None:
        """Returns the best plan that fits and takes less than that, None if there is none."""
        best = None
        for bound, candidate, recompute in self._open_candidates(seconds):
            if bound >= seconds or not self.left:
                break
            for plan in self._plans(candidate, recompute, seconds):
                predicted = self.planner.predict(plan)
                assert predicted is not None
                if seconds_of(predicted) < seconds:
                    whole = self.planner.predict_whole(predicted)
                    if is_within(whole, self.planner.limits):
                        best, seconds = whole, seconds_of(whole)
        return best

    def _open_candidates(self, seconds: float) -> list[tuple[float, Candidate, tuple[bool, ...]]]:
        """Returns candidates and recompute that may take less than some seconds, by their bounds, the least first."""
        found = []
        for candidate in candidates(self.problem):
            sized = self.planner.sized(candidate.num_micro_batches)
            for recompute in product(sized.recompute_choices, repeat=len(candidate.starts)):
                variant = replace(candidate, schedule=self._schedules(candidate)[0])
                plan = self.planner.put_together(variant, next(self._options(variant, recompute)))
                bound = self.planner.bound(plan) / self._worth(candidate)
                if bound < seconds:
                    found.append((bound, candidate, recompute))
        return sorted(found, key=lambda each: each[0])

    def _plans(self, candidate: Candidate, recompute: tuple[bool, ...], seconds: float) -> Iterator[Plan]:
        """Yields plans with all depths and schedules, but for those that depths alone make slower."""
        limit = seconds * self._worth(candidate)
        for schedule in self._schedules(candidate):
            variant = replace(candidate, schedule=schedule)
            for options in self._options(variant, recompute):
                plan = self.planner.put_together(variant, options)
                self.left = max(self.left - 1, 0)
                is_open = candidate.is_interleaved or bound_at_depths(self.planner.pipeline(plan)) < limit
                if is_open and self.left:
                    self.left -= 1
                    yield plan

    def _options(self, variant: Candidate, recompute: tuple[bool, ...]) -> Iterator[Options]:
        """Yields stages with all depths, the greatest first."""
        options = self.planner.options(self.planner.sized(variant.num_micro_batches), variant)
        shares = [-(-variant.num_micro_batches // len(ranks)) for ranks in variant.ranks]
        forced, is_full = self.problem.constraints.in_flight, variant.schedule == "gpipe"
        for depths in product(*[range(share, 0, -1) for share in shares]):
            whole = shares if is_full else [min(forced, share) for share in shares]
            if (is_full or forced) and list(depths) != whole:
                continue
            stages = zip(options, recompute, depths, strict=True)
            yield tuple(option._replace(needs_recompute=again, in_flight=depth) for option, again, depth in stages)

    def _worth(self, candidate: Candidate) -> float:
        return WORTH if candidate.is_interleaved else 1.0

    def _schedules(self, candidate: Candidate) -> list[str]:
        forced = self.problem.constraints.schedule
        every = INTERLEAVED if candidate.is_interleaved else ONE_A_RANK
        free = [each for each in every if each != "gpipe" or not self.problem.constraints.in_flight]
        return free if forced == "auto" else [forced]


def better_plan(problem: Problem) -> Plan | None:
    """Returns a plan that is better by a hundredth than the one that is made, or than the bound, if there is one."""
    every, least = EveryDepth(problem, 1_500), math.inf
    with suppress(PlanError):
        bound = min(bound_of_all(every.planner.sized(count)) for count in micro_batch_counts(problem))
        least = max(seconds_of(make_plan(problem)) * BETTER, bound)
    return every.better_than(least)


def small_problem(seed: int) -> Problem:
    """A few blocks, some loosely joined, on up to three equal ranks with much or little memory."""
    rng = random.Random(seed)
    sizes = rng.randint(1, 5), rng.randint(1, 3), rng.randint(3, 6)
    shape = {"skips": rng.randint(0, 3), "tied": rng.randint(0, 1), "loose": rng.random() < 0.4}
    link, memory_bytes = rng.choice([LinkCost(1e-5, 1e10), SLOW]), rng.choice([1e12, 2.0e6, 1.2e6, 8e5])
    return make_problem(*sizes, seed, **shape, link=link, memory_bytes=memory_bytes)
