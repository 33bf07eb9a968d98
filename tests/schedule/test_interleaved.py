"""Interleaving: several stages a rank shorten the fill and the drain of a pipeline, as far as theory says."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics

import pytest

from autovaruna.schedule.bound import lower_bound
from autovaruna.schedule.pipeline import Pipeline, StageTimes, latency_depth, textbook_depth
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import simulate
from tests.schedule.pipelines import chain, placed

DEPTHS = {"textbook": textbook_depth, "latency": latency_depth}


def in_turn(
    num_ranks: int, each: int, num_micro_batches: int, depth: str = "textbook", latency: float = 0.0
) -> Pipeline:
    """Equal stages, `each` of them on every rank, in turn; one rank's forwards and backwards take 3 seconds."""
    pipeline = chain(num_ranks * each, num_micro_batches, 1 / each, 2 / each, latency, depth=DEPTHS[depth])
    return placed(pipeline, [(s % num_ranks,) for s in range(num_ranks * each)], num_ranks)


def scaled(stage: StageTimes, factor: float) -> StageTimes:
    """A stage that takes longer or shorter."""
    seconds = stage.forward_seconds * factor, stage.backward_seconds * factor
    return dataclasses.replace(stage, forward_seconds=seconds[0], backward_seconds=seconds[1])


@pytest.mark.parametrize(("num_ranks", "each", "rounds"), itertools.product((2, 3, 4, 6, 8), (2, 4), (1, 2, 4)))
def test_fill_and_drain_are_divided_by_the_stages_of_a_rank(num_ranks: int, each: int, rounds: int) -> None:
    """With multiples of P micro-batches, and enough in flight, there is no other bubble."""
    count = num_ranks * rounds
    pipeline = in_turn(num_ranks, each, count, "latency")
    ideal = 3 * (count + (num_ranks - 1) / each)
    assert simulate(pipeline, POLICIES["interleaved"]).step_seconds == pytest.approx(ideal)
    assert ideal <= simulate(pipeline, POLICIES["deepest_first"]).step_seconds <= ideal * 1.1


def test_rounds_stay_near_the_bound_where_messages_take_time_and_counts_are_odd() -> None:
    """Stages differ by 15 % either way; a step takes 3 % more than nothing can beat, with 1F1B 10 %."""
    chance = random.Random(0)
    over: dict[str, list[float]] = {"interleaved": [], "1f1b": []}
    for _ in range(40):
        num_ranks, each = chance.choice((2, 3, 4, 6, 8)), chance.choice((2, 3, 4))
        count = int(num_ranks * chance.choice((1, 1.3, 1.5, 2, 2.7, 3, 4)))
        pipeline = in_turn(num_ranks, each, count, "latency", latency=0.1)
        stages = [scaled(stage, chance.uniform(0.85, 1.15)) for stage in pipeline.stages]
        pipeline = dataclasses.replace(pipeline, stages=tuple(stages))
        for name, found in over.items():
            found.append(simulate(pipeline, POLICIES[name]).step_seconds / lower_bound(pipeline))
    assert statistics.mean(over["interleaved"]) < 1.03 < statistics.mean(over["1f1b"])


def test_memory_stays_near_that_of_one_stage_a_rank() -> None:
    """Rank 0 holds P (1 + 1 / v) micro-batches of its stages together, not the M that it has."""
    peaks = simulate(in_turn(4, 2, 64), POLICIES["interleaved"]).peak_in_flight
    assert (peaks[0][0] + peaks[4][0]) / 2 <= 6


def test_the_turn_is_the_ranks_own() -> None:
    """1F1B, where each stage takes its own turns, is never faster."""
    best_depths = {"interleaved": "latency", "deepest_first": "textbook"}
    for num_ranks, each, rounds in itertools.product((2, 4, 8), (2, 4), (2, 4)):
        for name, depth in best_depths.items():
            pipeline = in_turn(num_ranks, each, num_ranks * rounds, depth)
            own, other = (simulate(pipeline, POLICIES[policy]).step_seconds for policy in (name, "1f1b"))
            assert own <= other
