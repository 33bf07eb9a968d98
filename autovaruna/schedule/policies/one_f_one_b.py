"""Defines the 1F1B schedule."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.policy import Choice, Policy, pick_in_turn
from autovaruna.schedule.replica import Replica


class OneFOneB(Policy):
    """Runs forwards up to the in-flight depth (warm-up), then one backward and one forward in turn.

        rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
        rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .

    The turn is the depth's doing: a stage at its depth goes backward, one below it goes forward, and one that cannot
    have its turn takes the other. A rank with several stages first serves those whose turn is backward, deepest first.
    A last stage of depth 1 goes backward right after each forward, so it never recomputes; more depth there pays only
    if its rank has other stages. Elsewhere a recompute goes right before its backward, or earlier if there is nothing
    else to do.
    The drawing has depth S - s; see `latency_depth` for slow links.

    References:
        Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019.
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021 (interleaving).
    """

    name = "1f1b"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses a backward whose turn it is, else the deepest forward, else any backward, else a recompute."""
        return pick_in_turn(replicas, replicas)

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether the stage recomputes; the last one at depth 1 does not."""
        return pipeline.recomputes(stage) and not (pipeline.is_last(stage) and pipeline.stages[stage].in_flight == 1)
