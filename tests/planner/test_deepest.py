"""What no plan of a candidate beats in the memory that there is: less than all plans that fit take."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from autovaruna.planner.bounds.deepest import deepest
from autovaruna.planner.candidate import DEEPEST, Candidate, Planner
from autovaruna.planner.memory.fitting import Option, fits, peak_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from tests.planner.cases import make_problem, make_split, make_uneven

_EVERY = {"auto": ("1f1b", "varuna"), "zero_bubble": ("zero_bubble",)}


def some_problem(seed: int, schedule: str) -> Problem:
    """Three uneven ranks."""
    dice = random.Random(seed)
    problem = make_uneven(make_problem(4, 3, 6, seed, skips=1, num_micro_batches=6, schedule=schedule), dice)
    return make_split(problem, dice) if schedule == "zero_bubble" else problem


def with_limits(problem: Problem, candidate: Candidate, dice: random.Random) -> Problem:
    """The problem with some memory between what each stage needs least and most."""
    planner = planner_of(problem)
    sized, limits = planner.sized(candidate.num_micro_batches), list(problem.cluster.memory_bytes)
    for option in planner.options(sized, replace(candidate, depth=DEEPEST)):
        least = peak_of(sized, option._replace(needs_recompute=True, in_flight=1, deferred=0)).num_bytes
        most = peak_of(sized, option).num_bytes
        limits[option.ranks[0]] = least + dice.uniform(-0.05, 0.5) * (most - least)
    return replace(problem, cluster=replace(problem.cluster, memory_bytes=tuple(limits)))


def planner_of(problem: Problem) -> Planner:
    return Planner(problem, RangeTables(problem.graph, range(5)))


def some_ways(planner: Planner, candidate: Candidate, dice: random.Random) -> list[list[Option]]:
    """Returns some of all depths, recompute and deferral, the shallowest first."""
    sized, count = planner.sized(candidate.num_micro_batches), candidate.num_micro_batches
    stages = []
    for option in planner.options(sized, candidate):
        depths, deferrals = range(1, count + 1), sorted({0, min(1, option.deferred), option.deferred})
        ways = product(sized.recompute_choices, depths, deferrals)
        stages.append([option._replace(needs_recompute=r, in_flight=d, deferred=w) for r, d, w in ways])
    ways_of_all = list(map(list, product(*stages)))
    return [
        [option._replace(needs_recompute=True, in_flight=1, deferred=0) for option in ways_of_all[0]],
        *dice.sample(ways_of_all, 140),
    ]


@pytest.mark.parametrize("schedule", _EVERY)
def test_no_depths_and_recompute_that_fit_beat_the_bound(schedule: str) -> None:
    num_tighter = num_without = 0
    for seed in range(12):
        dice = random.Random(seed)
        for starts, ranks in (((0, 2), ((0,), (1,))), ((0, 1, 3), ((1,), (2,), (0,)))):
            candidate = Candidate(starts, ranks, 6, schedule=_EVERY[schedule][0])
            problem = with_limits(some_problem(seed, schedule), candidate, dice)
            planner, limits = planner_of(problem), problem.cluster.memory_bytes
            sized, ways = planner.sized(6), some_ways(planner, candidate, dice)
            plans = [planner.put_together(candidate, each) for each in ways if fits(sized, each, limits)]
            known = min(planner.bound(planner.put_together(candidate, each)) for each in ways)
            found = deepest(planner, candidate, known)
            num_without += found is None
            assert (found is None) == (not fits(sized, ways[0], limits))
            if found is None:
                continue
            bound, _, plan = found
            assert all(stage.memory_bytes <= limits[stage.ranks[0]] for stage in plan.stages)
            num_tighter += bound > known * 1.01
            for each, policy in product(plans[:15], _EVERY[schedule]):
                predicted = planner.predict(replace(each, schedule=policy))
                assert predicted is not None
                assert bound <= predicted.predicted_seconds * (1 + 1e-9)
    assert num_tighter >= 5
    assert num_without >= 1
