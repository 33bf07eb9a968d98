"""Holds every policy to the laws of schedules, over products of sizes and random pipelines."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule import check
from autovaruna.schedule.bound import Bounds, lower_bound
from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulation import Simulation
from autovaruna.schedule.simulator import replay, simulate, step_seconds
from tests.schedule.pipelines import chain, deepened, placed, random_pipeline

NUM_RANDOM = 250


def fitted(pipeline: Pipeline, name: str) -> Pipeline:
    return deepened(pipeline) if name == "gpipe" else pipeline


def assert_laws(pipeline: Pipeline, name: str) -> Simulation:
    """Asserts that a policy's schedule keeps the rules, can be replayed or given up, and stays above the bound."""
    pipeline = fitted(pipeline, name)
    simulation = simulate(pipeline, POLICIES[name])
    check(simulation.schedule, pipeline)
    assert replay(pipeline, simulation.schedule).events == simulation.events
    assert lower_bound(pipeline) <= Bounds(pipeline).at_depths <= simulation.step_seconds
    assert step_seconds(pipeline, POLICIES[name], simulation.step_seconds * 1.001) == simulation.step_seconds
    assert step_seconds(pipeline, POLICIES[name], simulation.step_seconds) >= simulation.step_seconds
    assert POLICIES[name].num_instructions(pipeline) == sum(map(len, simulation.acts))
    for stage, peaks in zip(pipeline.stages, simulation.peak_in_flight, strict=True):
        assert all(0 <= peak <= stage.in_flight for peak in peaks)
    return simulation


@pytest.mark.parametrize("name", POLICIES)
def test_products_of_stages_micro_batches_and_depth(name: str) -> None:
    for num_stages, num_micro_batches, depth in itertools.product(range(1, 7), range(1, 9), (1, 2, 3, 7)):
        pipeline = chain(num_stages, num_micro_batches, 1.0, 2.0, 0.5, lambda n, s, d=depth: d, 1.0, 0.75)
        assert_laws(pipeline, name)


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_that_takes_too_long_is_given_up(name: str) -> None:
    for num_stages, num_micro_batches in itertools.product((1, 2, 4), (1, 8)):
        pipeline = fitted(chain(num_stages, num_micro_batches, 1.0, 2.0, 0.5, recompute=1.0, weight=0.75), name)
        assert step_seconds(pipeline, POLICIES[name], 0.9 * lower_bound(pipeline)) == math.inf


@pytest.mark.parametrize("name", POLICIES)
def test_random_pipelines(name: str) -> None:
    for seed in range(NUM_RANDOM):
        assert_laws(random_pipeline(seed), name)


def test_a_bound_knows_which_ranks_talk_to_each_other() -> None:
    """Micro-batches go from rank 0 to 2 and from 1 to 3; only from 0 to 3 would they be quick."""
    pipeline = placed(chain(2, 2, 1.0, 2.0, 0.5), [(0, 1), (2, 3)], 4)

    def links(source: int, destination: int) -> LinkCost:
        return LinkCost(0.0 if {source, destination} == {0, 3} else 5.0, math.inf)

    far = dataclasses.replace(pipeline, links=links)
    assert lower_bound(far) == pytest.approx(16.0) == pytest.approx(simulate(far, POLICIES["1f1b"]).step_seconds)


@pytest.mark.parametrize("name", POLICIES)
def test_interleaved_stages_at_any_depth(name: str) -> None:
    """Several stages a rank: round robin, folded back, and all on one rank, down to a depth of 1."""
    placements = [[0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0], [0, 0, 0]]
    for placement, depth, num_micro_batches in itertools.product(placements, (1, 2, 4), (1, 3, 8)):
        pipeline = chain(
            len(placement), num_micro_batches, latency=0.25, depth=lambda n, s, d=depth: d, recompute=1.0, weight=0.5
        )
        assert_laws(placed(pipeline, [(rank,) for rank in placement], max(placement) + 1), name)


@pytest.mark.parametrize("name", POLICIES)
def test_replicas_in_a_grid_and_unequal(name: str) -> None:
    placements = [[(0, 1), (2, 3)], [(0, 1), (2, 3, 4)], [(0, 1, 2), (3,)], [(0,), (1, 2, 3), (0, 3)], [(0, 1, 2)]]
    for placement, depth, num_micro_batches in itertools.product(placements, (1, 3), (1, 2, 7)):
        pipeline = chain(len(placement), num_micro_batches, latency=0.25, depth=lambda n, s, d=depth: d, weight=0.5)
        assert_laws(placed(pipeline, placement, 6), name)


@pytest.mark.parametrize("name", POLICIES)
def test_each_rank_is_never_in_two_places(name: str) -> None:
    """Instructions of one rank follow each other without overlap, and the account of its time adds up to the step."""
    for seed in range(60):
        simulation = simulate(fitted(random_pipeline(seed), name), POLICIES[name])
        for before, after in itertools.pairwise(simulation.events):
            assert before.rank < after.rank or before.end_seconds <= after.start_seconds
        for lost in simulation.lost:
            parts = dataclasses.astuple(lost)
            assert min(parts) >= -1e-9 and sum(parts) == pytest.approx(simulation.step_seconds)


@pytest.mark.parametrize("name", POLICIES)
def test_same_simulation_twice(name: str) -> None:
    for seed in range(40):
        pipeline = fitted(random_pipeline(seed), name)
        first, second = (simulate(pipeline, POLICIES[name]) for _ in range(2))
        assert (first.events, first.step_seconds) == (second.events, second.step_seconds)


def test_split_backwards_over_all_products_up_to_twelve() -> None:
    """Any depth and any number of deferred weight gradients, each computed once, after its backward, in time."""
    for num_stages, num_micro_batches in itertools.product(range(1, 13), range(1, 13)):
        for depth, deferred in ((1, 1), (3, 2), (12, 24)):
            pipeline = chain(
                num_stages,
                num_micro_batches,
                1.0,
                2.0,
                0.5,
                lambda n, s, d=depth: min(d, n - s + 1),
                weight=0.75,
                deferred=lambda n, s, d=deferred: d,
            )
            simulation = assert_laws(pipeline, "zero_bubble")
            assert (
                sum(act[3] is Kind.WEIGHT for row in simulation.acts for act in row) == num_stages * num_micro_batches
            )


@pytest.mark.parametrize("name", ["1f1b", "varuna", "zero_bubble"])
def test_a_rank_never_waits_while_something_may_run(name: str) -> None:
    """All work on one rank takes the sum of the work, whatever the depth: the proof of liveness needs it."""
    pipeline = placed(chain(5, 6, 1.0, 2.0, depth=lambda n, s: 1, weight=0.5), [(0,)] * 5, 1)
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
