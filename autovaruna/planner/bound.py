"""Proves a lower bound on the step over all plans of the searched kind: every cut, every replica count.

A step of T seconds needs, for a stage of the segments i .. j-1, so many replicas that

    before(i) + ceil(M / replicas) * work(i, j) + max(all-reduce, after(i)) <= T,

where before and after are the least waits of a stage that starts at i (see fill.py). If even the split with the fewest
replicas needs more ranks than there are, no plan takes T seconds or less. That is checked exactly, over all splits, by
one pass of dynamic programming; bisection finds the greatest T that is proven impossible. Beside it stands the total
work over the sum of speeds.

Where a large graph was reduced to segments, a stage is charged only the segments that it has whole, and no memory
limit, so that the bound holds for cuts inside of segments too.
"""

from __future__ import annotations

import math

import numpy as np

from autovaruna.planner.chain import partition_chain
from autovaruna.planner.costs import Array
from autovaruna.planner.memory import forbid_empty
from autovaruna.planner.replicas import block_fills
from autovaruna.planner.sized import Sized

# Times of the simulator are rounded to 2**-40 s; the bound stays below by more than all roundings together.
_ROUNDING = 1e-9
_PRECISION = 1e-5


class StepBound:
    """The bound for one number of micro-batches."""

    def __init__(self, sized: Sized) -> None:
        self.sized = sized
        problem = sized.problem
        self.constraints, self.cluster = problem.constraints, problem.cluster
        self.num_ranks = self.cluster.num_ranks
        self.is_exact = sized.tables.num_segments == len(problem.graph.blocks)
        self._work, self._reduce = self._least_work(), self._inner(sized.reduce_seconds)
        self._before, self._after = (self._from_here_on(fill) for fill in block_fills(sized))
        self.is_shared = len({r for ranks in self.constraints.stage_ranks for r in ranks}) < sum(
            len(ranks) for ranks in self.constraints.stage_ranks
        )

    def seconds(self, upper: float) -> float:
        """Returns a proven bound, `upper` at most: nothing is gained by proving more than the best plan takes."""
        low = min(self.work_bound(), upper)
        if not self.is_shared:
            low = max(low, min(self._stage_bound(low, upper), upper))
        return low * (1.0 - _ROUNDING)

    def work_bound(self) -> float:
        """Returns the bound of total work: every micro-batch passes every block on some rank."""
        ranks = {rank for ranks in self.constraints.stage_ranks for rank in ranks} or range(self.num_ranks)
        speeds = [self.cluster.speeds[rank] for rank in ranks]
        total = float(self.sized.step_seconds.sum())
        return max(total * self.sized.num_micro_batches / sum(speeds), total / max(speeds))

    def _stage_bound(self, low: float, upper: float) -> float:
        if self.constraints.stage_ranks:
            replicas = [len(ranks) for ranks in self.constraints.stage_ranks]
            split = partition_chain([self._seconds_with(count) for count in replicas])
            return split.objective if split else math.inf
        if not self.is_possible(upper * (1.0 - _PRECISION)):
            return upper * (1.0 - _PRECISION)
        high = upper
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.is_possible(middle) else (middle, high)
        return low

    def is_possible(self, seconds: float) -> bool:
        """Returns whether the bound leaves room for a plan of so many seconds."""
        need = self._ranks_needed(seconds)
        constraints = self.constraints
        stages = constraints.num_stages or (len(constraints.cuts) + 1 if constraints.cuts else 0)
        return _fewest(need, stages if self.is_exact else 0) <= self.num_ranks

    def _ranks_needed(self, seconds: float) -> Array:
        """Returns the fewest replicas of each range that finish in time, infinite if none do."""
        forced = self.constraints.num_replicas
        if forced:
            return np.where(self._seconds_with(forced) <= seconds, float(forced), np.inf)
        work, num_micro_batches = self._work, self.sized.num_micro_batches
        spare = seconds - self._before[:, None] - np.maximum(self._reduce, self._after[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.floor(np.where(work > 0, spare / work + _ROUNDING, np.inf))
            several = np.maximum(np.ceil(num_micro_batches / share), 2.0)
        needed = np.where((share >= 1) & (spare >= 0) & np.isfinite(work), several, np.inf)
        return np.where(self._seconds_with(1) <= seconds, 1.0, needed)

    def _seconds_with(self, replicas: int) -> Array:
        share = -(-self.sized.num_micro_batches // replicas)
        tail = np.broadcast_to(self._after[:, None], self._work.shape)
        if replicas > 1:
            tail = np.maximum(tail, self._reduce)
        return np.asarray(self._before[:, None] + share * self._work + tail, dtype=np.float64)

    def _least_work(self) -> Array:
        """Returns the least seconds of each range for one micro-batch on the fastest rank, infinite where none fits."""
        sized, speed = self.sized, max(self.cluster.speeds)
        work = sized.ways.allowed_work(1, max(self.cluster.memory_bytes) if self.is_exact else np.inf) / speed
        # Some schedules never recompute the last stage.
        work[:, -1] = np.where(np.isfinite(work[:, -1]), sized.work[:, -1] / speed, np.inf)
        return self._inner(work)

    def _inner(self, table: Array) -> Array:
        """Returns the table over the segments that a stage is sure to have whole."""
        if self.is_exact:
            return table
        inner = np.zeros_like(table)
        inner[:-1] = np.where(np.isfinite(table[1:]), table[1:], 0.0)
        return forbid_empty(inner)

    def _from_here_on(self, fill: Array) -> Array:
        """Returns the waits of a stage that starts at a position (exactly, or anywhere from there on)."""
        if not self.is_exact:
            fill = np.minimum.accumulate(fill[::-1])[::-1]
        return np.append(fill[self.sized.tables.positions[:-1]], 0.0)


def _fewest(need: Array, num_stages: int) -> float:
    """Returns the fewest ranks of a split into `num_stages` stages (0: any number)."""
    n = need.shape[0] - 1
    if num_stages:
        best = np.full(n + 1, np.inf)
        best[n] = 0.0
        for _ in range(num_stages):
            best = (need + best[None, :]).min(axis=1)
        return float(best[0])
    best = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        best[i] = (need[i, i + 1 :] + best[i + 1 :]).min()
    return float(best[0])
