"""Draws small problems of every kind, with limits of memory that bind."""

from __future__ import annotations

import random
from dataclasses import replace

from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from tests.planner.brute import small_problem
from tests.planner.cases import make_split, make_uneven


def draw(seed: int, schedule: str = "auto", most_each: int = 1) -> Problem:
    """A small problem on uneven ranks; in most, they have less memory than the best plan would take."""
    dice = random.Random(seed * 31 + 7)
    problem = make_uneven(small_problem(seed), dice, dice.randint(1, 2))
    problem = make_split(problem, dice) if schedule == "zero_bubble" else problem
    problem = with_memory(problem, 1e12)
    constraints = replace(problem.constraints, schedule=schedule, max_stages_per_rank=most_each)
    problem = replace(problem, constraints=constraints)
    share = dice.choice([1e3, 0.95, dice.uniform(0.6, 1.0)])
    return with_memory(problem, share * max(make_plan(problem).rank_bytes()))


def with_memory(problem: Problem, num_bytes: float) -> Problem:
    limits = (num_bytes,) * problem.cluster.num_ranks
    return replace(problem, cluster=replace(problem.cluster, memory_bytes=limits))
