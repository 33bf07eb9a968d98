"""Interleaving: several stages a rank shorten the fill and the drain of a pipeline, as far as theory says."""

from __future__ import annotations

import itertools

import pytest

from autovaruna.schedule import POLICIES, Pipeline, latency_depth, simulate, textbook_depth
from tests.schedule.pipelines import chain, placed

DEPTHS = {"textbook": textbook_depth, "latency": latency_depth}


def in_turn(num_ranks: int, each: int, num_micro_batches: int, depth: str = "textbook") -> Pipeline:
    """Equal stages, `each` of them on every rank, in turn; one rank's forwards and backwards take 3 seconds."""
    pipeline = chain(num_ranks * each, num_micro_batches, 1 / each, 2 / each, depth=DEPTHS[depth])
    return placed(pipeline, [(s % num_ranks,) for s in range(num_ranks * each)], num_ranks)


@pytest.mark.parametrize(("num_ranks", "each", "rounds"), itertools.product((2, 3, 4, 6, 8), (2, 4), (1, 2, 4)))
def test_fill_and_drain_are_divided_by_the_stages_of_a_rank(num_ranks: int, each: int, rounds: int) -> None:
    """With multiples of P micro-batches one of the two depths leaves no other bubble, but for a few percent."""
    count = num_ranks * rounds
    best = min(
        simulate(in_turn(num_ranks, each, count, depth), POLICIES["interleaved"]).step_seconds for depth in DEPTHS
    )
    ideal = 3 * (count + (num_ranks - 1) / each)
    assert ideal * (1 - 1e-9) <= best <= ideal * 1.04
    assert best < 3 * (count + num_ranks - 1)


def test_memory_stays_near_that_of_one_stage_a_rank() -> None:
    """Rank 0 holds P (1 + 1 / v) micro-batches of its stages together, not the M that it has."""
    peaks = simulate(in_turn(4, 2, 64), POLICIES["interleaved"]).peak_in_flight
    assert (peaks[0][0] + peaks[4][0]) / 2 <= 6


def test_the_turn_is_the_ranks_own() -> None:
    """1F1B, where each stage takes its own turns, is slower."""
    for num_ranks, each, rounds in itertools.product((2, 4, 8), (2, 4), (2, 4)):
        pipeline = in_turn(num_ranks, each, num_ranks * rounds)
        steps = [simulate(pipeline, POLICIES[name]).step_seconds for name in ("interleaved", "1f1b")]
        assert steps[0] < steps[1]
