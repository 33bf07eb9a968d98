"""Compares simulated steps with times computed by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.bound import lower_bound
from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.pipeline import Edge, Pipeline, StageTimes, latency_depth
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import simulate
from tests.own_time import takes_at_most
from tests.schedule.pipelines import chain, deepened, placed

F, B = 1.0, 2.0


def seconds(pipeline: Pipeline, name: str = "1f1b") -> float:
    return simulate(pipeline, POLICIES[name]).step_seconds


@pytest.mark.parametrize("name", POLICIES)
def test_equal_stages_without_latency(name: str) -> None:
    for num_stages, num_micro_batches in itertools.product(range(1, 6), range(1, 9)):
        expected = (num_micro_batches + num_stages - 1) * (F + B)
        pipeline = deepened(chain(num_stages, num_micro_batches, F, B))
        assert seconds(pipeline, name) == lower_bound(pipeline) == expected


def test_depth_of_one_is_one_micro_batch_at_a_time() -> None:
    assert seconds(chain(3, 4, F, B, depth=lambda n, s: 1)) == 4 * 3 * (F + B)
    assert seconds(chain(3, 4, F, B, latency=0.5, depth=lambda n, s: 1)) == 4 * (3 * (F + B) + 4 * 0.5)


def test_textbook_depth_pays_for_latency_and_the_deeper_one_hides_it() -> None:
    """With latency c, depth S - s loses 2c for each micro-batch in turn; 2(S - 1 - s) + 1 reaches the lower bound."""
    for num_stages, latency in itertools.product((2, 3, 4, 6), (0.25, 0.5, 1.0)):
        textbook = chain(num_stages, 24, F, B, latency)
        deeper = chain(num_stages, 24, F, B, latency, latency_depth)
        assert (
            seconds(deeper) == lower_bound(deeper) == (24 + num_stages - 1) * (F + B) + 2 * (num_stages - 1) * latency
        )
        assert seconds(textbook) > 1.05 * seconds(deeper)


def test_varuna_beats_textbook_1f1b_on_slow_links() -> None:
    for latency in (1.0, 2.0, 4.0):
        textbook = chain(4, 16, F, B, latency, recompute=F)
        deeper = chain(4, 16, F, B, latency, latency_depth, recompute=F)
        assert seconds(deeper, "varuna") < 0.97 * seconds(textbook)


def test_split_backwards_reach_the_bound() -> None:
    """With W as long as B, the last stage never waits once it has begun: 2(S - 1) of 3(S - 1) idle slots are gone.

    On 8 stages and 16 micro-batches that is a fifth of the step, with no more in memory on any stage than 1F1B has on
    the first. Messages as long as a stage are hidden with twice as many deferred as there are stages.
    """
    for num_stages, num_micro_batches in itertools.product((2, 4, 8), (8, 16, 32)):
        pipeline = chain(num_stages, num_micro_batches, 1.0, 2.0, weight=1.0)
        assert seconds(pipeline, "zero_bubble") == lower_bound(pipeline) == 3 * num_micro_batches + num_stages - 1
        assert seconds(pipeline, "1f1b") == 3 * (num_micro_batches + num_stages - 1)
    slow = chain(8, 16, 1.0, 2.0, 1.0, latency_depth, weight=1.0, deferred=lambda n, s: 2 * n)
    assert seconds(slow, "zero_bubble") == lower_bound(slow) == 48 + 7 * 2 < 0.75 * seconds(slow, "1f1b")


def test_gradients_are_summed_after_the_last_of_them() -> None:
    pipeline = chain(2, 3, 1.0, 2.0, weight=1.0)
    stages = tuple(dataclasses.replace(stage, reduce_seconds=0.5) for stage in pipeline.stages)
    simulation = simulate(dataclasses.replace(pipeline, stages=stages), POLICIES["zero_bubble"])
    for reduction in simulation.reductions:
        assert reduction.start_seconds == simulation.acts[reduction.stage][-1][1]
        assert simulation.acts[reduction.stage][-1][3] is Kind.WEIGHT


def test_place_of_the_slow_stage_changes_the_step() -> None:
    def slow(stage: int) -> Pipeline:
        pipeline = chain(4, 8, F, B)
        stages = list(pipeline.stages)
        stages[stage] = dataclasses.replace(stages[stage], forward_seconds=1.5 * F, backward_seconds=1.5 * B)
        return dataclasses.replace(pipeline, stages=tuple(stages))

    assert seconds(slow(0)) == 40.5
    assert seconds(slow(3)) == 45.0


def test_interleaving_halves_the_bubble() -> None:
    """Four ranks with two half stages each lose half of what four whole stages lose."""
    whole = chain(4, 8, 2 * F, 2 * B)
    halves = chain(8, 8, F, B, depth=lambda n, s: 2 * (n - s))
    interleaved = placed(halves, [(s % 4,) for s in range(8)], 4)
    assert seconds(whole) == (8 + 3) * 2 * (F + B)
    assert seconds(interleaved) == (8 + 3 / 2) * 2 * (F + B) == lower_bound(interleaved)


def test_replicas_share_the_micro_batches() -> None:
    """A stage twice as slow as its neighbours, with two replicas, keeps up with them."""
    stages = (StageTimes((0,), 1.0, 1.0, 5), StageTimes((1, 2), 2.0, 2.0, 3), StageTimes((3,), 1.0, 1.0, 1))
    pipeline = Pipeline(stages, (Edge(0, 1, 0, 0), Edge(1, 2, 0, 0)), 4, 20)
    assert seconds(pipeline) == pytest.approx(20 * 2.0 + 2 + 4, abs=2.0)
    assert seconds(placed(pipeline, [(0,), (1,), (3,)], 4)) >= 20 * 4.0


def test_forward_only_is_the_forwards_alone() -> None:
    pipeline = dataclasses.replace(chain(3, 5, F, B, latency=0.5, recompute=F), needs_gradients=False)
    for policy in POLICIES.values():
        simulation = simulate(pipeline, policy)
        assert simulation.step_seconds == lower_bound(pipeline) == (5 + 2) * F + 2 * 0.5
        assert simulation.peak_in_flight == ((0,), (0,), (0,))


def test_messages_of_a_pair_of_ranks_share_its_bandwidth() -> None:
    """Messages that take longer than the stages: one follows the other, latency is paid once."""
    stages = (StageTimes((0,), 1.0, 1.0, 1), StageTimes((1,), 1.0, 1.0, 1))
    link = LinkCost(0.5, 10.0)
    pipeline = Pipeline(stages, (Edge(0, 1, 30.0, 0.0),), 2, 4, lambda a, b: link, needs_gradients=False)
    assert seconds(pipeline) == 1.0 + 4 * 3.0 + 0.5 + 1.0


def test_an_edge_without_gradient_does_not_hold_up_backward() -> None:
    pipeline = chain(2, 1, F, B, latency=10.0)
    integers = dataclasses.replace(pipeline, edges=(Edge(0, 1, 8.0, 0.0, needs_gradient=False),))
    assert (seconds(pipeline), seconds(integers)) == (2 * F + 2 * B + 20.0, 2 * F + B + 10.0)


def test_a_faster_replica_takes_less_time() -> None:
    pipeline = Pipeline((StageTimes((0, 1), F, B, 1, speeds=(2.0, 0.5)),), (), 2, 4)
    assert [event.end_seconds for event in simulate(pipeline, POLICIES["1f1b"]).events][3::4] == [3.0, 12.0]


def test_all_reduce_overlaps_with_earlier_stages() -> None:
    """The last stage reduces while the first still goes backward; the first one's all-reduce is at the end."""
    pipeline = chain(2, 4, F, B)
    stages = tuple(dataclasses.replace(stage, reduce_seconds=1.5) for stage in pipeline.stages)
    simulation = simulate(dataclasses.replace(pipeline, stages=stages, optimizer_seconds=(0.5, 4.0)), POLICIES["1f1b"])
    assert [(r.stage, r.start_seconds) for r in simulation.reductions] == [(1, 13.0), (0, 15.0)]
    assert simulation.step_seconds == 13.0 + 1.5 + 4.0
    assert [(lost.reduce_seconds, lost.optimizer_seconds) for lost in simulation.lost] == [(1.5, 0.5), (1.5, 4.0)]


def test_lost_time_of_each_kind() -> None:
    pipeline = dataclasses.replace(chain(2, 1, F, B, latency=0.5), overhead_seconds=0.25)
    first, last = simulate(pipeline, POLICIES["1f1b"]).lost
    assert (first.work_seconds, first.overhead_seconds, first.message_seconds, first.bubble_seconds) == (3, 0.5, 0.5, 4)
    assert (last.work_seconds, last.overhead_seconds, last.message_seconds, last.bubble_seconds) == (3, 0.5, 0.5, 4)


def test_decimal_times_tie_as_they_do_on_paper() -> None:
    """Sums of 0.1 in different orders differ in floating point; the simulator's do not, so neither do choices."""
    for num_micro_batches in (3, 10):
        tenths = simulate(chain(4, num_micro_batches, 0.1, 0.2, 0.3), POLICIES["varuna"])
        whole = simulate(chain(4, num_micro_batches, 1.0, 2.0, 3.0), POLICIES["varuna"])
        assert tenths.schedule == whole.schedule
        assert tenths.step_seconds == pytest.approx(whole.step_seconds / 10)


@pytest.mark.parametrize("name", POLICIES)
def test_twenty_thousand_micro_batches(name: str) -> None:
    pipeline = deepened(chain(2, 20_000, F, B))
    found = []
    assert takes_at_most(30, lambda: found.append(seconds(pipeline, name)))
    assert found[0] == 20_001 * (F + B)
