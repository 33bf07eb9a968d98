"""Proves a lower bound on the step of a pipeline, over all policies and in-flight depths.

The head of a stage is the least time before it can start, the tail the least time after its last instruction ends, both
longest paths through the edges with the fastest replicas and links. A rank cannot do the work of its stages outside of
the least head and the least tail among them. For one stage a rank this is

    max_s [ sum_{j<s} (F_j + c_j) + M_s (F_s + B_s) + sum_{j<s} (B_j + c_j) ]

with M_s the micro-batches of its busiest replica. A second bound counts the way down and up: no backward of a stage
starts before its first micro-batch was at the last stage and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.pipeline import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Pipeline,
    StageTimes,
    exact,
    pairs_of,
    seconds_of,
    work_seconds,
)


def lower_bound(pipeline: Pipeline) -> float:
    """Returns seconds that no schedule of this pipeline can beat (in-flight depths set aside)."""
    return Bounds(pipeline).lower


class _Work(NamedTuple):
    """The least seconds of one micro-batch on one replica."""

    forward: float
    recompute: float
    backward: float


class Bounds:
    """The bounds of one pipeline, by the longest paths from stage to stage.

    Attributes:
        work: of each stage, on each distinct replica.
        heads: least seconds before the stage can start.
        tails: least seconds after its last instruction ends.
        round_trips: least seconds between a forward's end and its backward's start.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.work = [
            [_work(pipeline, s, i) for i in range(times.num_replicas if times.speeds else 1)]
            for s, times in enumerate(pipeline.stages)
        ]
        self.heads = [0.0] * pipeline.num_stages
        self.round_trips = [min(each.recompute for each in some) for some in self.work]
        self.tails = [0.0] * pipeline.num_stages
        if pipeline.needs_gradients:
            optimizers = [exact(seconds) for seconds in pipeline.optimizer_seconds]
            self.tails = [_finish_seconds(times, optimizers) for times in pipeline.stages]
        self._follow_paths()

    def on(self, stage: int, replica: int) -> _Work:
        """Returns the work of a micro-batch on a replica."""
        distinct = self.work[stage]
        return distinct[replica if len(distinct) > 1 else 0]

    def _follow_paths(self) -> None:
        pipeline, costs = self.pipeline, _message_seconds(self.pipeline)
        forward = [min(each.forward for each in some) for some in self.work]
        backward = [min(each.backward for each in some) for some in self.work]
        ascending = sorted(costs)
        for s, t in ascending:
            self.heads[t] = max(self.heads[t], self.heads[s] + forward[s] + costs[s, t][0])
        for s, t in reversed(ascending):
            down, up = costs[s, t]
            if up is not None:
                trip = down + forward[t] + self.round_trips[t] + backward[t] + up
                self.round_trips[s] = max(self.round_trips[s], trip)
            if not pipeline.needs_gradients:
                self.tails[s] = max(self.tails[s], down + forward[t] + self.tails[t])
        for s, t in ascending:
            up = costs[s, t][1]
            if up is not None:
                self.tails[t] = max(self.tails[t], up + backward[s] + self.tails[s])

    @cached_property
    def lower(self) -> float:
        """Seconds that no schedule can beat, in-flight depths set aside."""
        pipeline, held = self.pipeline, dict[int, list[tuple[int, int]]]()
        for stage, times in enumerate(pipeline.stages):
            for replica, rank in enumerate(times.ranks):
                held.setdefault(rank, []).append((stage, replica))
        shared = self._busy_seconds() / pipeline.cores if pipeline.cores < math.inf else 0.0
        return max(*map(self._of_rank, held.values()), *map(self._of_stage, range(pipeline.num_stages)), shared)

    def _seconds(self, stage: int, replica: int) -> float:
        """Returns what one micro-batch takes on a replica, there and back."""
        each = self.on(stage, replica)
        return each.forward + each.recompute + (each.backward if self.pipeline.needs_gradients else 0.0)

    def _busy_seconds(self) -> float:
        """Returns what all ranks together are busy at least."""
        pipeline = self.pipeline
        work = 0.0
        for stage, times in enumerate(pipeline.stages):
            for replica in range(times.num_replicas):
                work += pipeline.share(stage, replica) * self._seconds(stage, replica)
        return work + (sum(pipeline.optimizer_seconds) if pipeline.needs_gradients else 0.0)

    def _of_rank(self, mine: list[tuple[int, int]]) -> float:
        """Returns the bound of a rank with some replicas: from any one on, least head + work + least tail."""
        best, work, tail = 0.0, 0.0, math.inf
        for stage, replica in sorted(mine, key=lambda each: -self.heads[each[0]]):
            if share := self.pipeline.share(stage, replica):
                work, tail = work + share * self._seconds(stage, replica), min(tail, self.tails[stage])
                best = max(best, self.heads[stage] + work + tail)
        return best

    def _of_stage(self, stage: int) -> float:
        if not self.pipeline.needs_gradients:
            return 0.0
        first = self.on(stage, 0)
        others = (self.pipeline.share(stage, 0) - 1) * max(first.forward, first.backward)
        trip = self.heads[stage] + first.forward + self.round_trips[stage] + first.backward
        return trip + others + self.tails[stage]

    @cached_property
    def rank_tails(self) -> list[float]:
        """For each rank, seconds that any schedule takes at least from its last instruction to the end."""
        tails = [math.inf] * self.pipeline.num_ranks
        for stage, times in enumerate(self.pipeline.stages):
            for rank in times.ranks:
                tails[rank] = min(tails[rank], self.tails[stage])
        return [tail if tail < math.inf else 0.0 for tail in tails]


def _work(pipeline: Pipeline, stage: int, replica: int) -> _Work:
    seconds = work_seconds(pipeline, stage, replica)
    has_to_recompute = pipeline.recomputes(stage) and not pipeline.is_last(stage)
    return _Work(seconds[FORWARD], seconds[RECOMPUTE] if has_to_recompute else 0.0, seconds[BACKWARD])


def _finish_seconds(times: StageTimes, optimizers: Sequence[float]) -> float:
    """Returns the least seconds after a stage's last gradients: the all-reduce, which joins its ranks; optimizer."""
    reduce = exact(times.reduce_seconds) - exact(times.reduce_lead_seconds)
    if not optimizers:
        return reduce
    return reduce + (max if reduce > 0 else min)([optimizers[rank] for rank in times.ranks])


def _message_seconds(pipeline: Pipeline) -> dict[tuple[int, int], tuple[float, float | None]]:
    """Returns, for each edge, the least seconds of its message and of its gradient (None if there is none)."""

    @cache  # ranks with several stages send over the same links again
    def links(senders: tuple[int, ...], receivers: tuple[int, ...]) -> set[LinkCost]:
        return _links(pipeline, senders, receivers)

    def least(senders: tuple[int, ...], receivers: tuple[int, ...], num_bytes: float) -> float:
        return min([sum(seconds_of(link, num_bytes)) for link in links(senders, receivers)], default=0.0)

    costs: dict[tuple[int, int], tuple[float, float | None]] = {}
    for edge in pipeline.edges:
        senders, receivers = pipeline.stages[edge.source].ranks, pipeline.stages[edge.destination].ranks
        has_gradient = pipeline.needs_gradients and edge.needs_gradient
        up = least(receivers, senders, edge.backward_bytes) if has_gradient else None
        costs[edge.source, edge.destination] = least(senders, receivers, edge.forward_bytes), up
    return costs


def _links(pipeline: Pipeline, senders: tuple[int, ...], receivers: tuple[int, ...]) -> set[LinkCost]:
    """Returns the links that micro-batches take from some ranks to others; none if one of them stays on its rank."""
    links: set[LinkCost] = set()
    for a, b in pairs_of(senders, receivers, pipeline.num_micro_batches):
        if a == b:
            return set()
        links.add(pipeline.links(a, b))
    return links
