"""Computes what each instruction takes on each replica."""

from __future__ import annotations

from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.messages import exact
from autovaruna.schedule.pipeline import Pipeline, StageTimes


def work_seconds(pipeline: Pipeline, stage: int, replica: int, *, is_split: bool = False) -> dict[Kind, float]:
    """Returns the seconds of each kind of instruction on one replica, executor overhead included.

    Args:
        pipeline: The pipeline.
        stage: The stage.
        replica: Which of its replicas.
        is_split: Whether weight gradients are computed apart from backward.
    """
    times = pipeline.stages[stage]
    speed, overhead = times.speed(replica), exact(pipeline.overhead_seconds)
    backward = times.input_seconds if is_split else times.backward_seconds
    return {
        Kind.FORWARD: exact(times.forward_seconds / speed) + overhead,
        Kind.RECOMPUTE: exact(times.recompute_seconds / speed) + overhead,
        Kind.BACKWARD: exact(backward / speed) + overhead,
        Kind.WEIGHT: exact(times.weight_seconds / speed) + overhead,
    }


def fastest_seconds(pipeline: Pipeline, stage: int, kind: Kind) -> float:
    """Returns the seconds of an instruction on the fastest replica of a stage."""
    return min(work_seconds(pipeline, stage, i)[kind] for i in distinct_replicas(pipeline.stages[stage]))


def distinct_replicas(times: StageTimes) -> range:
    """Returns replicas of a stage that stand for all: the first one, where all have one speed."""
    return range(times.num_replicas if times.speeds else 1)
