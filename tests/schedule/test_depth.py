"""Holds the in-flight depths to what they promise."""

from __future__ import annotations

from autovaruna.schedule.bound import lower_bound
from autovaruna.schedule.pipeline import deepest_in_flight, latency_depth, textbook_depth
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import simulate
from tests.schedule.pipelines import chain, placed


def test_equal_replicas_have_the_textbook_numbers() -> None:
    for num_replicas in ((), (1,) * 4, (3,) * 4):
        assert [textbook_depth(4, stage, num_replicas) for stage in range(4)] == [4, 3, 2, 1]
        assert [latency_depth(4, stage, num_replicas) for stage in range(4)] == [7, 5, 3, 1]


def test_unequal_replicas_need_one_micro_batch_in_each_later_replica() -> None:
    assert [textbook_depth(3, stage, (1, 2, 4)) for stage in range(3)] == [7, 3, 1]
    assert [textbook_depth(3, stage, (4, 2, 1)) for stage in range(3)] == [2, 2, 1]
    assert [latency_depth(3, stage, (1, 2, 4)) for stage in range(3)] == [13, 5, 1]


def test_textbook_depth_is_enough_without_latency_and_one_less_is_not() -> None:
    for num_stages in range(2, 6):
        enough = chain(num_stages, 12, 1.0, 2.0)
        less = chain(num_stages, 12, 1.0, 2.0, depth=lambda n, s: max(1, textbook_depth(n, s) - 1))
        assert simulate(enough, POLICIES["1f1b"]).step_seconds == lower_bound(enough)
        assert simulate(less, POLICIES["1f1b"]).step_seconds > lower_bound(less)


def test_deepest_is_the_share_of_the_busiest_replica() -> None:
    pipeline = placed(chain(3, 7), [(0,), (0, 1), (0, 1, 2)], 3)
    assert [deepest_in_flight(pipeline, stage) for stage in range(3)] == [7, 4, 3]


def test_a_deeper_plan_beyond_the_deepest_changes_nothing() -> None:
    steps = {simulate(chain(3, 5, depth=lambda n, s, d=d: d), POLICIES["varuna"]).schedule for d in (5, 6, 50)}
    assert len(steps) == 1
