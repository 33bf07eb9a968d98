"""Says what a stage takes at the least, from the begin of a step to its end, whatever segments and ranks it has.

A stage of the segments i .. j-1 on r replicas, whose busiest one has m = ceil(M / r) micro-batches, ends no sooner than

    before(i, j) + busy + max(all-reduce(r) + optimizer, after(i, j)),

with the waits of range_waits.py and `busy` the greatest of three:

    m * work,    ceil(m / depth) * (work + trip(j)),    (m + 1 - depth) * work + 2 * trip(j)  if m > depth,

work with or without recompute, and the greatest depth for which memory has room in that case. The second, since a
forward starts once the backward `depth` micro-batches before it has ended. The third, since no more than `depth`
forwards run before the first backward, no more than `depth` backwards after the last forward, and these two end a trip
after they begin, one before the other. Nor does a stage end before all messages of its lines have passed.

Where weight gradients are computed apart from backward, `work` above is the rest of it, and `after(i, j)` follows that;
a second bound holds all of the work, and nothing but the all-reduce and the optimizer after it. The greater one counts.

Where a large graph was reduced to segments, a stage is charged only the segments that it has whole, and of its memory
only what the rest of it adds to, so that the bound holds for cuts inside of segments too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.bounds.demand import Computed, Listed, Needs
from autovaruna.planner.bounds.range_waits import RangeWaits, range_waits_of
from autovaruna.planner.bounds.ways import ROUNDING, Way
from autovaruna.planner.costs import Array
from autovaruna.planner.memory.stage_bytes import deepest
from autovaruna.planner.sized import Sized

_FEW_RANKS = 16


class RangeSeconds:
    """The least seconds of a stage for every range of segments.

    Args:
        sized: the problem at M micro-batches.
        ranks: if given, what is said holds for a stage on just these, in whatever order.
        waits: what `range_waits_of` says, if that is known.
    """

    def __init__(self, sized: Sized, ranks: Sequence[int] = (), waits: RangeWaits | None = None) -> None:
        self.sized = sized
        self.constraints, self.cluster = sized.problem.constraints, sized.problem.cluster
        self.num_ranks = self.cluster.num_ranks
        self.num_micro_batches = sized.num_micro_batches
        self.is_exact = is_exact(sized)
        # Replicas with most micro-batches may be on the ranks that have most memory; others need less.
        num_full = self.num_micro_batches % len(ranks) or len(ranks) if ranks else 1
        ranks = ranks or range(self.num_ranks)
        self.speeds = sorted((self.cluster.speeds[rank] for rank in ranks), reverse=True)
        self.limit_bytes = sorted((self.cluster.memory_bytes[rank] for rank in ranks), reverse=True)[num_full - 1]
        self.hosts = Counter(self.cluster.hosts[rank] for rank in ranks)
        self.waits = waits or range_waits_of([sized], is_exact=self.is_exact)[0]
        self._rows, self._columns = sized.tables.ranges
        first = self._rows if self.is_exact else self._rows + 1
        self._before, self._after = (table[sized.tables.ranges] for table in (self.waits.before, self.waits.after))
        self._inside = first * (sized.tables.num_segments + 1) + self._columns
        self._is_empty = np.flatnonzero(first == self._columns)

    @property
    def places(self) -> NDArray[np.int64]:
        """Where each range is in a matrix with a row and a column for each end of a segment, row after row."""
        return np.asarray(self._rows * (self.sized.tables.num_segments + 1) + self._columns)

    def needs(self) -> Needs:
        """Returns how many ranks each range needs to end in time."""
        forced = self.constraints.num_replicas
        if forced or self.num_ranks <= _FEW_RANKS:
            counts = [forced] if forced else range(self.num_ranks, 0, -1)
            return Listed([(count, self._seconds_of(count)) for count in counts])
        before = self._before
        return Computed(
            self.num_micro_batches,
            self._seconds_of(1),
            before + self._reduce_tail(2),
            self._ways,
            before + self._finish_seconds(2) if self.sized.is_split else None,
            self._whole_ways if self.sized.is_split else (),
        )

    def stage_seconds(self, replicas: int) -> Array:
        """Returns the least seconds to the end of the step of each range on so many replicas, as a matrix."""
        n = self.sized.tables.num_segments
        seconds = np.full((n + 1, n + 1), np.inf)
        seconds[self._rows, self._columns] = self._seconds_of(replicas)
        return seconds

    @cached_property
    def _ways(self) -> list[Way]:
        return [self._way(again, self.sized.urgent_work) for again in self.sized.recompute_choices]

    @cached_property
    def _whole_ways(self) -> list[Way]:
        """The same with all of the work, as far as some of it is computed apart."""
        return [self._way(again, self.sized.work) for again in self.sized.recompute_choices]

    @cached_property
    def _optimizer(self) -> Array:
        return self._inner(self.sized.optimizer_seconds) / self.speeds[0]

    @cached_property
    def _trained_bytes(self) -> Array:
        return self._inner(self.sized.tables.trained_bytes)

    def _seconds_of(self, replicas: int) -> Array:
        share = -(-self.num_micro_batches // replicas)
        best = np.minimum.reduce([way.work_seconds(share, self._busy_seconds(way, replicas)) for way in self._ways])
        best = np.maximum(best, self._line_seconds(replicas)) + self._reduce_tail(replicas)
        if self.sized.is_split:
            busy = np.minimum.reduce([self._busy_seconds(way, replicas) for way in self._whole_ways])
            best = np.maximum(best, busy + self._finish_seconds(replicas))
        return np.asarray(self._before + best, dtype=np.float64)

    def _busy_seconds(self, way: Way, replicas: int) -> Array:
        """Returns the least seconds that the busiest or slowest replica works, on the fastest ranks.

        Replicas with a micro-batch more are charged to faster ranks: the other way round, the greatest is no less.
        """
        count, fastest = self.num_micro_batches, self.speeds[0]
        shares = (-(-(count - k) // replicas) for k in range(min(replicas, count)))
        loads = set(zip(shares, (fastest / speed for speed in self.speeds[:replicas]), strict=False))
        overhead = self.sized.overhead_seconds + self.cluster.overhead_seconds
        busy = [share * np.maximum(way.work * slower - overhead * (slower - 1.0), way.work) for share, slower in loads]
        return np.asarray(np.maximum.reduce(busy), dtype=np.float64)

    def _line_seconds(self, replicas: int) -> Array:
        """Returns the seconds that messages of a range take on its busiest line, and the work on one of them.

        A line joins two ranks, and there are no more lines between two stages than pairs of replicas.
        """
        forced = self.constraints.num_replicas
        lines = forced or replicas * max(self.num_ranks - replicas, 1)
        each = max(-(-self.num_micro_batches // lines) - 1, 0) * self.waits.line
        work = np.minimum.reduce([way.work for way in self._ways])
        return np.asarray(np.maximum(each[self._rows], each[self._columns]) + work)

    def _reduce_tail(self, replicas: int) -> Array:
        """Returns the least seconds from a range's last backward to the end of the step."""
        return np.maximum(self._after, self._finish_seconds(replicas))

    def _finish_seconds(self, replicas: int) -> Array:
        """Returns the least seconds from a range's last gradients to the end of the step, without waits for others."""
        is_local = replicas <= max(self.hosts.values())
        reduce = self.sized.reduce_seconds(replicas, self._trained_bytes, is_local=is_local)
        slowest = self.speeds[0] / self.speeds[min(replicas, len(self.speeds)) - 1]
        optimizer = self._optimizer * np.where(reduce > 0, slowest, 1.0)  # An all-reduce ends on all its ranks at once.
        return np.asarray(reduce + optimizer, dtype=np.float64)

    def _way(self, needs_recompute: bool, table: Array) -> Way:
        sized, speed = self.sized, self.speeds[0]
        work, again = self._inner(table) / speed + sized.overhead_seconds, np.zeros(len(self._rows))
        if needs_recompute:
            forward = self._inner(sized.tables.add_up(sized.costs.forward_seconds))
            again = forward / speed + self.cluster.overhead_seconds
            again[self._columns == sized.tables.num_segments] = 0.0  # Some schedules never recompute the last stage.
        work[self._is_empty] = again[self._is_empty] = 0.0
        trip, is_full = self.waits.trip[self._columns], self.constraints.schedule == "gpipe"
        return Way(work + again, again, trip, self._depths(needs_recompute), is_full)

    def _depths(self, needs_recompute: bool) -> Array:
        """Returns the greatest in-flight depth of each range that memory and settings allow."""
        if not self.is_exact:
            return self._loose_depths(needs_recompute)
        held = (self.sized.recomputed_bytes if needs_recompute else self.sized.plain_bytes).map(self._inner)
        least_share = -(-self.sized.num_micro_batches // self.cluster.num_ranks)
        depth = deepest(held, self.limit_bytes * (1 + ROUNDING), least_share)
        is_forced = self.constraints.in_flight and self.constraints.schedule != "gpipe"  # which holds all of them
        if self.sized.problem.needs_gradient and is_forced:
            depth = np.where(depth > 0, np.minimum(depth, self.constraints.in_flight), depth)
        return np.maximum(depth, 0.0)

    def _loose_depths(self, needs_recompute: bool) -> Array:
        """Returns the same of what more segments can only add to: state, gradients, and what is saved for backward."""
        sized = self.sized
        room = self.limit_bytes * (1 + ROUNDING) - self._inner(sized.fixed_bytes)
        room[self._is_empty] = np.inf
        depth = np.full_like(room, np.inf)
        if sized.problem.needs_gradient and not needs_recompute:
            with np.errstate(divide="ignore", invalid="ignore"):
                depth = np.floor(room / self._inner(sized.saved_bytes)) + 1.0  # The last one may come as others go.
            depth[np.isnan(depth)] = np.inf
        return np.where(room >= 0, depth, 0.0)

    def _inner(self, table: Array) -> Array:
        """Returns the entries of a table for the segments that a stage of each range is sure to have whole."""
        return np.asarray(table.ravel().take(self._inside))


def is_exact(sized: Sized) -> bool:
    """Returns whether stages start where segments do and nowhere else."""
    problem = sized.problem
    return problem.constraints.has_fixed_places or sized.tables.num_segments == len(problem.graph.blocks)
