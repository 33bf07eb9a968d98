"""Computes in-flight depths: how many forwards one replica may run ahead of its backwards."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.pipeline import Pipeline


def textbook_depth(num_stages: int, stage: int, num_replicas: Sequence[int] = ()) -> int:
    """Returns the depth of textbook 1F1B: one micro-batch in every replica from `stage` to the last stage.

    With equal replicas this is S - s. Any depth of at least 1 is free of deadlock; a smaller one leaves ranks idle.

    Args:
        num_stages: the number of stages S.
        stage: the stage s.
        num_replicas: replicas of each stage; empty: equally many everywhere.
    """
    replicas = num_replicas or (1,) * num_stages
    return _per_replica(sum(replicas[stage:]), replicas[stage])


def latency_depth(num_stages: int, stage: int, num_replicas: Sequence[int] = ()) -> int:
    """Returns the depth that also hides messages which take no longer than a stage.

    With equal replicas this is 2(S - 1 - s) + 1: one micro-batch in every later replica, and one on every link.
    """
    replicas = num_replicas or (1,) * num_stages
    return _per_replica(replicas[stage] + 2 * sum(replicas[stage + 1 :]), replicas[stage])


def deepest_in_flight(pipeline: Pipeline, stage: int) -> int:
    """Returns the depth beyond which none matters: the micro-batches of the stage's busiest replica (gpipe's depth)."""
    return max(1, pipeline.share(stage, 0))


def _per_replica(total: int, num_replicas: int) -> int:
    return -(-total // num_replicas)
