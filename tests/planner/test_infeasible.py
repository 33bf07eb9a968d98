"""Problems without a plan say what is missing: bytes, the stage, the largest block, what would make it fit."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.candidate import Planner
from autovaruna.planner.partition import cut_for_ranks
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from tests.planner.cases import make_problem, on_cluster, with_memory
from tests.products import some

UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20}


def complaint(problem: Problem) -> str:
    with pytest.raises(PlanError) as caught:
        make_plan(problem)
    return str(caught.value)


def amounts(message: str, words: str) -> float:
    number, unit = re.search(words + r" ([\d.]+) (bytes|KiB|MiB)", message).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cuts": ("layers.1",), "num_replicas": 2}, ["into 2 stages", "drop num_stages, num_replicas"]),
        ({"recompute": "none"}, ["allow recompute", "use more ranks"]),
        ({"stage_ranks": ((0,), (1,), (0,), (1,))}, [" and stage ", "fewer of the stages"]),
        ({"num_stages": 2, "in_flight": 8, "recompute": "none"}, ["lower in_flight", "allow recompute"]),
        ({"schedule": "gpipe", "recompute": "none"}, ["gpipe holds all"]),
        ({"max_micro_batches": 2}, ["smaller micro-batches"]),
        ({"num_stages": 8, "max_stages_per_rank": 2}, [" and stage ", "fewer of the stages"]),
    ],
)
def test_settings_that_are_in_the_way_are_named(settings: dict[str, Any], words: list[str]) -> None:
    message = complaint(make_problem(12, 4, 16, memory_bytes=7.5e5 if "stage_ranks" in settings else 5e5, **settings))
    assert amounts(message, "micro-batches needs") > amounts(message, r"rank \d+ has")
    assert all(word in message for word in ["are missing", "The largest block is layers.", *words])


def test_no_plan_is_searched_for_where_weights_alone_are_too_much() -> None:
    """A block that no rank can hold, or a model that all ranks together cannot."""
    for forced in ({}, {"num_stages": 2}):
        message = complaint(make_problem(4, 4, 8, memory_bytes=2e5, **forced))
        assert "make its largest block smaller" in message
        assert "use more ranks" not in message and "more stages" not in message
    searched: list[str] = []
    for problem in (make_problem(4, 4, 8, memory_bytes=2e5), make_problem(24, 2, 8, memory_bytes=2e6)):
        with pytest.raises(PlanError, match="no plan fits into memory"):
            make_plan(problem, lambda what, share: searched.append(what))
    assert not searched


def test_the_rank_with_too_little_is_named() -> None:
    problem = make_problem(10, 3, 6, num_stages=3, num_replicas=1)
    message = complaint(on_cluster(problem, memory_bytes=(2e6, 1e4, 2e6)))
    assert "rank 1 has 9.77 KiB" in message
    assert "give rank 1" in message


def test_the_process_of_a_rank_counts_once_however_many_stages_it_has() -> None:
    """It was once counted for each of them, and the limit for cuts was too low by as much."""
    problem = make_problem(12, 4, 16, memory_bytes=7.5e5, stage_ranks=((0,), (1,), (0,), (1,)))
    process = 2.0**20
    beside = on_cluster(with_memory(problem, 7.5e5 + process), process_bytes=process)
    missing = [re.search(r"([\d.]+ KiB) are missing", complaint(each)) for each in (problem, beside)]
    assert missing[0] and missing[1] and missing[0][1] == missing[1][1]
    ranks = problem.constraints.stage_ranks
    for tight in (9e5, 1.2e6, 2e6):
        each = with_memory(problem, tight), with_memory(beside, tight + process)
        cuts = [cut_for_ranks(Planner(p, RangeTables(p.graph, range(13))), 16, ranks) for p in each]
        assert cuts[0] == cuts[1]


def uneven(seed: int) -> Problem:
    """A problem of ranks with too little memory, some much less than others, one none at all."""
    rng = random.Random(seed)
    num_ranks = rng.choice([3, 4, 6, 16])
    problem = make_problem(rng.choice([4, 6, 10]), num_ranks, 16, seed, num_stages=rng.choice([0, 0, 3]))
    limits = [1e5 * rng.choice([0.1, 0.3, 1.0, 1.0, 2.0]) for _ in range(num_ranks)]
    limits[rng.randrange(num_ranks)] = 0.0
    return on_cluster(problem, memory_bytes=tuple(limits))


def given(problem: Problem, message: str) -> Problem:
    limits = list(problem.cluster.memory_bytes)
    asked = re.search(r"To make it fit: give (.*?) or more", message)
    assert asked
    for listed, number, unit in re.findall(r"ranks? ([\d, -]+) ([\d.]+) (bytes|KiB|MiB)", asked[1]):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
            for rank in range(int(first), int(last or first) + 1):
                limits[rank] = max(limits[rank], float(number) * UNITS[unit])
    if every := re.search(r"each rank ([\d.]+) (bytes|KiB|MiB)", asked[1]):
        limits = [max(has, float(every[1]) * UNITS[every[2]]) for has in limits]
    return on_cluster(problem, memory_bytes=tuple(limits))


@pytest.mark.parametrize("seed", some([2, 1, 4, 5, 6, 3, 7, 8, 9, 0], 2))  # of 0 and 9 there are 16 ranks
def test_what_each_rank_lacks_is_said_at_once(seed: int) -> None:
    """One rank after the other was once named, and a rank without memory was divided by."""
    problem = uneven(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message = complaint(problem)
    make_plan(given(problem, message))


def test_a_split_that_fits_is_found_whatever_ranks_it_needs() -> None:
    """No plan was once said to fit, and 0 bytes to be missing."""
    few, enough, much = 3e4, 3e5, 6e5
    limits = (9e4, 9e4, 9e4, few, enough, enough, much, 0.0, *[enough] * 4, few, few, much, 0.0)
    problem = make_problem(4, 16, 16, 1033)
    make_plan(on_cluster(problem, memory_bytes=limits))
