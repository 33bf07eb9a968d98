"""Computes what each instruction takes on each replica."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.messages import exact
from autovaruna.schedule.pipeline import Pipeline, StageTimes


def work_seconds(pipeline: Pipeline, stage: int, replica: int, *, is_split: bool = False) -> Mapping[Kind, float]:
    """Returns the seconds of each kind of instruction on one replica, executor overhead included.

    Args:
        pipeline: The pipeline.
        stage: The stage.
        replica: Which of its replicas.
        is_split: Whether weight gradients are computed apart from backward.
    """
    times = pipeline.stages[stage]
    backward = times.input_seconds if is_split else times.backward_seconds
    each = times.forward_seconds, times.recompute_seconds, backward, times.weight_seconds
    return _by_kind(*each, times.speed(replica), pipeline.overhead_seconds)


@lru_cache(maxsize=1 << 12)
def _by_kind(
    forward: float, recompute: float, backward: float, weight: float, speed: float, overhead: float
) -> Mapping[Kind, float]:
    """Returns the seconds by kind; the pipelines of a search have the same few stages."""
    more = exact(overhead)
    return {
        Kind.FORWARD: exact(forward / speed) + more,
        Kind.RECOMPUTE: exact(recompute / speed) + more,
        Kind.BACKWARD: exact(backward / speed) + more,
        Kind.WEIGHT: exact(weight / speed) + more,
    }


def distinct_replicas(times: StageTimes) -> range:
    """Returns replicas of a stage that stand for all: the first one, where all have one speed."""
    return range(times.num_replicas if times.speeds else 1)
