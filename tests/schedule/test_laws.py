"""Laws of every schedule, and the depths and slices of policies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from itertools import product
from typing import Any

import pytest

from autovaruna.errors import ScheduleError
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.bound import lower_bound
from autovaruna.schedule.pipeline import Pipeline, latency_depth, slices, textbook_depth
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import simulate
from tests.schedule.pipelines import (
    assert_rules,
    bound_at_depths,
    chain,
    deepened,
    placed,
    random_pipeline,
    step_seconds,
)

NUM_RANDOM = 250


def fitted(pipeline: Pipeline, name: str) -> Pipeline:
    return deepened(pipeline) if name == "gpipe" else pipeline


def assert_laws(pipeline: Pipeline, name: str) -> None:
    """Asserts that a policy's schedule keeps the rules, can be given up, and stays above the bound.

    Instructions of one rank follow each other without overlap, and the account of its time adds up to the step.
    """
    pipeline = fitted(pipeline, name)
    simulation = simulate(pipeline, POLICIES[name])
    assert_rules(simulation.schedule, pipeline)
    assert lower_bound(pipeline) <= bound_at_depths(pipeline) <= simulation.step_seconds
    assert step_seconds(pipeline, POLICIES[name], simulation.step_seconds * 1.001) == simulation.step_seconds
    assert step_seconds(pipeline, POLICIES[name], simulation.step_seconds) >= simulation.step_seconds
    assert POLICIES[name].num_instructions(pipeline) == sum(map(len, simulation.acts))
    for acts, lost in zip(simulation.acts, simulation.lost, strict=True):
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(acts))
        parts = lost.parts.values()
        assert min(parts) >= -1e-9 and sum(parts) == pytest.approx(simulation.step_seconds)


@pytest.mark.parametrize("name", POLICIES)
def test_products_of_stages_micro_batches_and_depth(name: str) -> None:
    for num_stages, num_micro_batches, depth in product(range(1, 7), range(1, 9), (1, 2, 3, 7)):
        assert_laws(chain(num_stages, num_micro_batches, 1.0, 2.0, 0.5, lambda n, s, d=depth: d, 1.0), name)


@pytest.mark.parametrize("name", POLICIES)
def test_random_pipelines(name: str) -> None:
    for seed in range(NUM_RANDOM):
        assert_laws(random_pipeline(seed), name)


def test_a_bound_knows_which_ranks_talk_to_each_other() -> None:
    """Micro-batches go from rank 0 to 2 and from 1 to 3; only from 0 to 3 would they be quick."""
    pipeline = placed(chain(2, 2, 1.0, 2.0, 0.5), [(0, 1), (2, 3)], 4)
    far = dataclasses.replace(pipeline, links=lambda a, b: LinkCost(0.0 if {a, b} == {0, 3} else 5.0, math.inf))
    assert lower_bound(far) == pytest.approx(16.0) == pytest.approx(simulate(far, POLICIES["1f1b"]).step_seconds)


@pytest.mark.parametrize("name", POLICIES)
def test_interleaved_stages_and_replicas_at_any_depth(name: str) -> None:
    """Several stages a rank, round robin, folded back, and all on one rank; replicas in a grid and unequal."""
    orders = [0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0], [0, 0, 0]
    shared = [[(rank,) for rank in ranks] for ranks in orders]
    grids = [[(0, 1), (2, 3)], [(0, 1), (2, 3, 4)], [(0, 1, 2), (3,)], [(0,), (1, 2, 3), (0, 3)], [(0, 1, 2)]]
    for placement, depth, count in [*product(shared, (1, 2, 4), (1, 3, 8)), *product(grids, (1, 3), (1, 2, 7))]:
        how = {"latency": 0.25, "recompute": 1.0 if placement in shared else None}
        assert_laws(placed(chain(len(placement), count, depth=lambda n, s, d=depth: d, **how), placement, 6), name)


@pytest.mark.parametrize("name", ["1f1b", "varuna"])
def test_a_rank_never_waits_while_something_may_run(name: str) -> None:
    """All work on one rank takes the sum of the work, whatever the depth: the proof of liveness needs it."""
    pipeline = placed(chain(5, 6, 1.0, 2.0, depth=lambda n, s: 1), [(0,)] * 5, 1)
    assert simulate(pipeline, POLICIES[name]).step_seconds == 5 * 6 * 3.0


@pytest.mark.parametrize("name", POLICIES)
def test_only_links_that_messages_take_are_looked_up(name: str) -> None:
    """Of many replicas of two stages few pairs ever meet; to join them all took half of a search over 1,024 ranks."""
    pipeline, asked = chain(2, 60, 1.0, 2.0, 0.5), set[tuple[int, int]]()
    pipeline = fitted(placed(pipeline, [tuple(range(30)), tuple(range(30, 60))], 60), name)
    links = pipeline.links
    watched = dataclasses.replace(pipeline, links=lambda a, b: (asked.add((a, b)), links(a, b))[1])
    simulate(watched, POLICIES[name])
    there = {(m % 30, 30 + m % 30) for m in range(60)}
    assert asked == there | {(b, a) for a, b in there}


def test_gpipe_says_what_it_needs() -> None:
    with pytest.raises(ScheduleError, match="stage 0: gpipe holds 5 micro-batches in flight, the plan allows 2"):
        simulate(chain(2, 5), POLICIES["gpipe"])


def test_a_policy_that_waits_for_ever_is_an_error_not_a_hang() -> None:
    class Lazy(type(POLICIES["varuna"])):
        name = "lazy"

        def pick(self, replicas):
            return None

    with pytest.raises(ScheduleError, match="policy lazy waits on every rank"):
        simulate(chain(2, 2), Lazy())


def test_the_slices_of_a_mini_batch_follow_each_other_and_are_even() -> None:
    assert slices((4, 6), 1) == [(0, 4)]  # a mini-batch without a micro-batch is in none
    for mini_batches, num_micro_batches in product(((8,), (5, 8), (5, 0, 7), (2, 2, 9)), range(3, 12)):
        found = slices(mini_batches, num_micro_batches)
        assert len(found) == num_micro_batches
        for group, samples in enumerate(mini_batches):
            mine = found[group :: len(mini_batches)]
            sizes = [size for _, size in mine]
            assert [start for start, _ in mine] == [sum(sizes[:k]) for k in range(len(mine))]
            assert sum(sizes) == samples and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_depths_of_equal_and_unequal_replicas_and_textbook_depth_is_enough_without_latency() -> None:
    for num_replicas in ((), (1,) * 4, (3,) * 4):
        assert [textbook_depth(4, stage, num_replicas) for stage in range(4)] == [4, 3, 2, 1]
        assert [latency_depth(4, stage, num_replicas) for stage in range(4)] == [7, 5, 3, 1]
    assert [textbook_depth(3, stage, (1, 2, 4)) for stage in range(3)] == [7, 3, 1]
    assert [textbook_depth(3, stage, (4, 2, 1)) for stage in range(3)] == [2, 2, 1]
    assert [latency_depth(3, stage, (1, 2, 4)) for stage in range(3)] == [13, 5, 1]
    for num_stages in range(2, 6):
        enough = chain(num_stages, 12, 1.0, 2.0)
        less = chain(num_stages, 12, 1.0, 2.0, depth=lambda n, s: max(1, textbook_depth(n, s) - 1))
        assert simulate(enough, POLICIES["1f1b"]).step_seconds == lower_bound(enough)
        assert simulate(less, POLICIES["1f1b"]).step_seconds > lower_bound(less)


def in_turn(num_ranks: int, each: int, num_micro_batches: int, depth: Any, latency: float = 0.0) -> Pipeline:
    """Equal stages, `each` of them on every rank, in turn; one rank's forwards and backwards take 3 seconds."""
    pipeline = chain(num_ranks * each, num_micro_batches, 1 / each, 2 / each, latency, depth)
    return placed(pipeline, [(s % num_ranks,) for s in range(num_ranks * each)], num_ranks)


def test_rounds_stay_near_the_bound_where_messages_take_time_and_counts_are_odd() -> None:
    """Stages differ by 15 % either way; a step takes 3 % more than nothing can beat, with 1F1B 10 %."""
    chance = random.Random(0)
    over: dict[str, list[float]] = {"interleaved": [], "1f1b": []}
    for _ in range(40):
        num_ranks, each = chance.choice((2, 3, 4, 6, 8)), chance.choice((2, 3, 4))
        count = int(num_ranks * chance.choice((1, 1.3, 1.5, 2, 2.7, 3, 4)))
        pipeline = in_turn(num_ranks, each, count, latency_depth, latency=0.1)
        factors = [chance.uniform(0.85, 1.15) for _ in pipeline.stages]
        times = [{"forward_seconds": factor / each, "backward_seconds": 2 * factor / each} for factor in factors]
        stages = [dataclasses.replace(s, **seconds) for s, seconds in zip(pipeline.stages, times, strict=True)]
        pipeline = dataclasses.replace(pipeline, stages=tuple(stages))
        for name, found in over.items():
            found.append(simulate(pipeline, POLICIES[name]).step_seconds / lower_bound(pipeline))
    assert statistics.mean(over["interleaved"]) < 1.03 < statistics.mean(over["1f1b"])


def test_the_turn_is_the_ranks_own() -> None:
    """1F1B, where each stage takes its own turns, is never faster."""
    for num_ranks, each, rounds in product((2, 4, 8), (2, 4), (2, 4)):
        pipeline = in_turn(num_ranks, each, num_ranks * rounds, latency_depth)
        own, other = (simulate(pipeline, POLICIES[name]).step_seconds for name in ("interleaved", "1f1b"))
        assert own <= other
