"""Computes the step of a long, plain pipeline without simulating every instruction, to compare plans.

In 1F1B a stage of in-flight depth d runs d forwards, and from then on one backward and one forward in turn. If that is
the order, backward b of a stage waits for that of the next stage and for its own forward b + d - 1, and forward b + d
for that of the stage before. So all stages advance by one backward (from the last stage to the first) and one forward
(from the first to the last) at a time, two running maxima over the stages. The simulator may choose another order
where stages are uneven, and lets messages of one line wait for each other, so its step differs a little (by 2 % at most
in random pipelines whose stages differ by up to half, by nothing in most).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autovaruna.planner.costs import Array
from autovaruna.schedule import Kind, Pipeline, Policy
from autovaruna.schedule.costs import work_seconds

_APART = 2.0**20
"""More seconds than a step takes: keeps runs of stages apart in one running maximum."""


def is_plain(pipeline: Pipeline, policy: Policy) -> bool:
    """Returns whether the order can be foreseen.

    Every stage is one rank of its own and talks to its neighbours alone, and has fewer micro-batches in flight than the
    stage before it; with as many, a stage would often wait for its forward, and go backward out of turn.
    """
    if policy.name != "1f1b" or not pipeline.needs_gradients:
        return False
    ranks = {stage.ranks[0] for stage in pipeline.stages}
    neighbours = {(s, s + 1) for s in range(pipeline.num_stages - 1)}
    joined = {(edge.source, edge.destination) for edge in pipeline.edges if edge.needs_gradient}
    is_single = all(stage.num_replicas == 1 for stage in pipeline.stages) and len(ranks) == pipeline.num_stages
    depths = [min(stage.in_flight, pipeline.num_micro_batches) for stage in pipeline.stages]
    falls = all(b < a or a == pipeline.num_micro_batches for a, b in pairwise(depths))
    return is_single and falls and joined == neighbours and len(pipeline.edges) == len(joined)


def cycle_seconds(pipeline: Pipeline) -> float:
    """Returns the seconds of a step of a plain pipeline in the fixed order of 1F1B."""
    cycles = _Cycles(pipeline)
    for m in range(int(cycles.depth.max())):
        cycles.fill(m)
    for b in range(pipeline.num_micro_batches):
        cycles.backward()
        cycles.forward(b)
    optimizer = [pipeline.optimizer_seconds[s.ranks[0]] if pipeline.optimizer_seconds else 0.0 for s in pipeline.stages]
    reduce = [stage.reduce_seconds for stage in pipeline.stages]
    return float((cycles.ends + np.array(reduce) + np.array(optimizer)).max())


class _Cycles:
    """Where each stage stands: `ends` is when its last instruction ends, ``forwards[m]`` when forward m does."""

    def __init__(self, pipeline: Pipeline) -> None:
        num_stages, self.count = pipeline.num_stages, pipeline.num_micro_batches
        seconds = [work_seconds(pipeline, s, 0) for s in range(num_stages)]
        self.work = {kind: np.array([each[kind] for each in seconds]) for kind in Kind}
        self.work[Kind.RECOMPUTE] *= [s + 1 < num_stages and pipeline.recomputes(s) for s in range(num_stages)]
        # What is in flight on a stage is so on all before it.
        in_flight = [min(stage.in_flight, self.count) for stage in pipeline.stages]
        self.depth = np.minimum.accumulate(np.array(in_flight))
        self.down, self.up = _message_seconds(pipeline)
        self.ends = np.zeros(num_stages)
        self.forwards = np.full((self.count, num_stages), -np.inf)
        self._prepare()

    def _prepare(self) -> None:
        """Adds up what does not change: the way down to each stage, and the way up to it."""
        self.way_down = np.cumsum(self.work[Kind.FORWARD] + self.down)
        self.way_up = np.cumsum((self.work[Kind.BACKWARD] + self.up)[::-1])[::-1]
        self.stages = np.arange(len(self.depth))
        self.starts_run = np.append(True, self.depth[1:] != self.depth[:-1])
        self.apart = np.cumsum(self.starts_run) * _APART

    def fill(self, m: int) -> None:
        """Runs forward m on all stages whose depth it fills."""
        here = int(np.count_nonzero(self.depth > m))
        way = self.way_down[:here]
        own = np.maximum(self.ends[:here], 0.0) + self.work[Kind.FORWARD][:here]
        self.ends[:here] = self.forwards[m, :here] = np.maximum.accumulate(own - way) + way

    def backward(self) -> None:
        """Runs the next backward, after its recompute, on all stages."""
        own = self.ends + self.work[Kind.RECOMPUTE] + self.work[Kind.BACKWARD]
        self.ends = np.maximum.accumulate((own - self.way_up)[::-1])[::-1] + self.way_up

    def forward(self, b: int) -> None:
        """Runs forward b + depth where there is one; stages of one depth run the same, others are ahead."""
        m = b + self.depth
        has = m < self.count
        if not has.any():
            return
        row = np.minimum(m, self.count - 1)
        before = np.where(self.starts_run & (self.stages > 0), self.forwards[row, self.stages - 1] + self.down, 0.0)
        own = np.maximum(self.ends, before) + self.work[Kind.FORWARD]
        ends = np.maximum.accumulate(own - self.way_down + self.apart) + self.way_down - self.apart
        self.ends = np.where(has, ends, self.ends)
        self.forwards[m[has], self.stages[has]] = ends[has]


def _message_seconds(pipeline: Pipeline) -> tuple[Array, Array]:
    """Returns what activations take to each stage, and gradients to each stage (0 at the ends)."""
    down, up = np.zeros(pipeline.num_stages), np.zeros(pipeline.num_stages)
    for edge in pipeline.edges:
        source, destination = (pipeline.stages[s].ranks[0] for s in (edge.source, edge.destination))
        there, back = pipeline.links(source, destination), pipeline.links(destination, source)
        down[edge.destination] = there.latency_seconds + edge.forward_bytes / there.bytes_per_second
        up[edge.source] = back.latency_seconds + edge.backward_bytes / back.bytes_per_second
    return down, up
