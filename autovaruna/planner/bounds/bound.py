"""Proves a lower bound on the step over all plans of the searched kind: every cut, every replica count.

A stage ends no sooner than range_seconds.py says. If even the split with the fewest replicas needs more ranks than
there are, no plan takes T seconds or less. That is checked exactly, over all splits, by one pass of dynamic
programming; bisection finds the greatest T that is proven impossible. Beside it stands the total work over the sum of
speeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autovaruna.planner.bounds.demand import Demand
from autovaruna.planner.bounds.range_seconds import RangeSeconds, is_exact
from autovaruna.planner.bounds.range_waits import RangeWaits, range_waits_of
from autovaruna.planner.bounds.ways import ROUNDING
from autovaruna.planner.chain import partition_chain
from autovaruna.planner.sized import Sized

_PRECISION = 1e-5
_AT_ONCE = 8
_ROWS = 64
_ENDLESS = 1e30
"""More seconds than any step takes."""


def step_bounds(sized_of: Callable[[int], Sized], counts: Sequence[int]) -> Iterator[StepBound]:
    """Yields the bounds for some numbers of micro-batches; what they wait for is found for many of them at once.

    Args:
        sized_of: says what the problem is at M micro-batches; each is let go of, since its tables are large.
        counts: every M.
    """
    for start in range(0, len(counts), _AT_ONCE):
        some = counts[start : start + _AT_ONCE]
        each = [sized_of(count) for count in some]
        found = range_waits_of(each, is_exact=is_exact(each[0]))
        del each
        for count, waits in zip(some, found, strict=True):
            yield StepBound(sized_of(count), waits=waits)


class StepBound:
    """The bound for one number of micro-batches.

    Args:
        sized: the problem at M micro-batches.
        waits: what `range_waits_of` says, if that is known.
    """

    def __init__(self, sized: Sized, waits: RangeWaits | None = None) -> None:
        self.sized = sized
        self.constraints, self.cluster = sized.problem.constraints, sized.problem.cluster
        self.num_ranks = self.cluster.num_ranks
        self.num_micro_batches = sized.num_micro_batches
        self.ranges = RangeSeconds(sized, waits=waits)
        self.is_shared = len({r for ranks in self.constraints.stage_ranks for r in ranks}) < sum(
            len(ranks) for ranks in self.constraints.stage_ranks
        )

    def seconds(self, upper: float) -> float:
        """Returns a proven bound, `upper` at most: nothing is gained by proving more than the best plan takes."""
        low = min(self.work_bound(), upper)
        if low < upper and not self.is_shared and not self._is_loosely_possible(upper * (1.0 - _PRECISION)):
            low = upper * (1.0 - _PRECISION)
        elif low < upper and not self.is_shared:
            low = max(low, min(self._stage_bound(low, upper), upper))
        return low * (1.0 - ROUNDING)

    def leaves_room(self, seconds: float) -> bool:
        """Returns whether a plan may take so many seconds; quicker than to know the bound."""
        if self.work_bound() > seconds or self.is_shared:
            return self.work_bound() <= seconds
        if self.constraints.stage_ranks:
            return self._stage_bound(0.0, math.inf) <= seconds
        return self._is_loosely_possible(seconds) and self._demand().is_met(seconds)

    def work_bound(self) -> float:
        """Returns the bound of total work: every micro-batch passes every block on some rank."""
        ranks = {rank for ranks in self.constraints.stage_ranks for rank in ranks} or range(self.num_ranks)
        speeds = [self.cluster.speeds[rank] for rank in ranks]
        total, overhead = float(self.sized.step_seconds.sum()), self.sized.overhead_seconds
        return (total + overhead * min(speeds)) * self.num_micro_batches / sum(speeds)

    def _stage_bound(self, low: float, upper: float) -> float:
        if self.constraints.stage_ranks:
            replicas = [len(ranks) for ranks in self.constraints.stage_ranks]
            split = partition_chain([self.ranges.stage_seconds(count) for count in replicas])
            return split.objective if split else math.inf
        demand = self._demand()
        high = min(upper * (1.0 - _PRECISION), _ENDLESS)
        if not demand.is_met(high):
            return upper * (1.0 - _PRECISION)
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if demand.is_met(middle) else (middle, high)
        return low

    def _demand(self) -> Demand:
        constraints, n = self.constraints, self.sized.tables.num_segments
        num_stages = constraints.num_stages or (len(constraints.cuts) + 1 if constraints.cuts else 0)
        ranges = self.ranges
        return Demand(ranges.needs(), ranges.places, n, num_stages if ranges.is_exact else 0, self.num_ranks)

    def _is_loosely_possible(self, seconds: float) -> bool:
        """Returns whether there is room for a plan if memory and messages are set aside: quick, and often enough."""
        constraints = self.constraints
        if not self.ranges.is_exact or constraints.num_replicas or constraints.stage_ranks:
            return True
        sized, count, waits = self.sized, self.num_micro_batches, self.ranges.waits
        ends = np.append(0.0, np.cumsum(sized.urgent_seconds))[sized.tables.positions] / self.ranges.speeds[0]
        seconds_per_byte = sized.all_reduces.cost(2, is_local=True)[1] if sized.problem.needs_gradient else 0.0
        best = np.zeros(len(ends))
        for last in range(len(ends) - 1, 0, -_ROWS):
            rows = slice(max(last - _ROWS, 0), last)
            work = ends[None, rows.start :] - ends[rows, None] + sized.overhead_seconds
            before, after = (table[rows, rows.start :] for table in (waits.before, waits.after))
            spare = seconds - before - after
            reduce = seconds_per_byte * sized.tables.trained_bytes[rows, rows.start :]
            reduced = np.minimum(spare, seconds - before - reduce)
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.floor(np.where(work > 0, reduced / work + ROUNDING, np.inf))
                several = np.where(share >= 1, np.maximum(np.ceil(count / share), 2.0), np.inf)
            need = np.where(count * work <= spare * (1 + ROUNDING), 1.0, several)
            for i in range(rows.stop - 1, rows.start - 1, -1):
                row = need[i - rows.start, i + 1 - rows.start :]
                best[i] = (row + best[i + 1 :]).min()
        return bool(best[0] <= self.num_ranks)
