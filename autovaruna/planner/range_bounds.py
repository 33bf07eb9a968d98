"""Bounds how soon a range of blocks can end as a stage, and counts the ranks that a split needs to end in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.cost_table import Array
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import forced_stages
from autovaruna.planner.stage_memory import ROUNDING, RecomputeOption, deepest, state_of_ranges
from autovaruna.profiler.records import Cluster, LinkCost


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds by block p, one entry more for the end of the graph.

    Attributes:
        before: of a stage that starts at p, before its first forward.
        after: of a stage that starts at p, after its last backward, until the step ends.
        messages: what of `before` and `after` together is messages to and from the stage that starts at p.
        activation, gradient: of the line between the stages that meet at p, for each of their messages.
    """

    before: Array
    after: Array
    messages: Array
    activation: Array
    gradient: Array


def waits_of(sized: SizedProblem) -> Waits:
    """Returns the least waits of a problem, on its fastest ranks and links."""
    problem, costs = sized.problem, sized.costs
    cluster, flow, back = problem.cluster, problem.flow, problem.gradient_flow
    speed, link, each = max(cluster.speeds), fastest_link(cluster), cluster.overhead_seconds
    activation = flow.neighbour_bytes(sized.micro_batch_size) / link.bytes_per_second
    gradient = back.neighbour_bytes(sized.micro_batch_size) / link.bytes_per_second
    before = np.append(flow.fill_seconds(costs.forward_seconds / speed), 0.0)
    after = np.append(back.fill_seconds(sized.backward_seconds / speed), 0.0)
    there, back_again = link.latency_seconds + activation, link.latency_seconds + gradient
    return Waits(
        before=np.where(before > 0, before + link.latency_seconds + activation + each, 0.0),
        after=np.where(after > 0, after + link.latency_seconds + gradient + each, 0.0),
        messages=np.where(before > 0, there, 0.0) + np.where(after > 0, back_again, 0.0),
        activation=activation,
        gradient=gradient,
    )


def fastest_link(cluster: Cluster) -> LinkCost:
    """Returns a link as good as the best between two ranks, in latency and in bandwidth."""
    hosts = cluster.hosts
    links = [cluster.local_link] if len(set(hosts)) < len(hosts) else []
    links += [cluster.remote_link] if len(set(hosts)) > 1 else []
    links = links or [cluster.local_link]
    return LinkCost(min(link.latency_seconds for link in links), max(link.bytes_per_second for link in links))


@dataclass(frozen=True, slots=True)
class RangeWaits:
    """Least seconds of other stages, by ``[i, j]`` of a stage of the segments i .. j-1.

    Attributes:
        before: before its first forward.
        after: after its last backward, until the step ends.
        trip: by j alone, between a forward and its backward.
        line: by the position of a cut, of each message between the stages that meet there.
    """

    before: Array
    after: Array
    trip: Array
    line: Array


def range_waits_of(each: Sequence[SizedProblem]) -> list[RangeWaits]:
    """Returns the least waits at some numbers of micro-batches, on the fastest ranks and links, all found at once.

    Where cuts may lie inside of segments, i and j are those in which a stage begins and ends.
    """
    problem, positions, is_exact = each[0].problem, each[0].tables.positions, each[0].is_exact
    cluster = problem.cluster
    once, speed = fastest_link(cluster).latency_seconds + cluster.overhead_seconds, max(cluster.speeds)
    there, back = problem.flow.holders, problem.gradient_flow.holders
    waits = [waits_of(sized) for sized in each]
    forward = np.stack([sized.costs.forward_seconds for sized in each]) / speed
    backward = np.stack([sized.backward_seconds for sized in each]) / speed
    before = _fill(there, forward, once, np.stack([one.activation for one in waits]), positions, is_exact)
    after = _fill(back, backward, once, np.stack([one.gradient for one in waits]), positions, is_exact)
    trips = [
        _trips(back, sized.urgent_seconds / speed, 2 * once + one.activation + one.gradient)
        for sized, one in zip(each, waits, strict=True)
    ]
    if is_exact:
        lines = [np.maximum(one.activation, one.gradient)[positions] for one in waits]
        return list(map(RangeWaits, before, after, [trip[positions] for trip in trips], lines))
    lines = [np.zeros(len(positions))] * len(each)
    least = [np.append(np.minimum.reduceat(trip[:-1], positions[:-1]), trip[-1]) for trip in trips]
    return list(map(RangeWaits, before, after, least, lines))


def _fill(
    holders: dict[int, list[int]],
    seconds: Array,
    once: float,
    messages: Array,
    positions: NDArray[np.int64],
    is_exact: bool,
) -> Array:
    """Returns the least waits of every range, for each row of `seconds` and `messages` of blocks.

    A stage from block p to block q waits for the stages that were the last to hold what it uses. The one that holds
    block h starts at some block i, has waited itself, and works till the end of h at least. A message takes the seconds
    of its bytes, and `once`.
    """
    rows, n = seconds.shape
    work = np.concatenate([np.zeros((rows, 1)), seconds.cumsum(axis=1)], axis=1)
    fill, from_neighbour, slack = np.zeros((rows, n)), np.zeros((rows, n)), np.zeros((rows, n))
    least = np.zeros((rows, n))  # of the waits of all blocks up to each, less the work before them
    starts = positions[:-1]
    waits, table = np.zeros((rows, len(starts))), np.zeros((rows, len(positions), len(positions)))
    columns, changed = {int(position): column for column, position in enumerate(positions)}, 0
    for q in range(n):
        before = q
        for h in holders.get(q, ()):
            since = work[:, h + 1] + slack[:, h]
            np.maximum(fill[:, h + 1 : q + 1], since[:, None], out=fill[:, h + 1 : q + 1])
            before = min(before, h + 1)
            if h == q - 1:
                from_neighbour[:, q] = since + messages[:, q]
        values = fill[:, before : q + 1] - work[:, before : q + 1]
        if before:
            np.minimum(values[:, 0], least[:, before - 1], out=values[:, 0])
        np.minimum.accumulate(values, axis=1, out=least[:, before : q + 1])
        slack[:, q] = least[:, q]
        changed = min(changed, before)  # What is before is as it was for the column before.
        if q + 1 in columns:
            column, first = columns[q + 1], int(starts.searchsorted(changed, side="right")) - 1
            own = starts[first:column]
            where = own if is_exact else slice(own[0], q + 1)
            filled, near = fill[:, where], from_neighbour[:, where]
            new = np.where(filled > 0, np.maximum(filled, near) + once, 0.0)
            waits[:, first:column] = new if is_exact else np.minimum.reduceat(new, own - own[0], axis=1)
            table[:, column, :column] = waits[:, :column]
            changed = q + 1
    return table.swapaxes(1, 2)


def _trips(holders: dict[int, list[int]], seconds: Array, messages: Array) -> Array:
    """Returns, by block p, the least seconds of later stages between a forward and its backward of one that ends there.

    A value that block p - 1 is the last to hold before block u goes to the stage with block u. That one starts at u or
    before, ends anywhere behind, and waits in its turn. If u is p, `messages` go there and back.
    """
    n = len(seconds)
    work = np.append(0.0, np.cumsum(seconds))
    users: dict[int, list[int]] = {}
    for user, each in holders.items():
        for holder in each:
            users.setdefault(holder + 1, []).append(user)
    trips, earliest = np.zeros(n + 1), np.full(n + 2, work[n])
    for p in range(n - 1, 0, -1):
        for user in users.get(p, ()):
            trips[p] = max(trips[p], earliest[user + 1] - work[user] + messages[p] * (user == p))
        earliest[p] = min(earliest[p + 1], work[p] + trips[p])
    return trips


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


_FEW_RANKS = 16


class RangeSeconds:
    """The least seconds of a stage for every range of segments, on the best ranks."""

    def __init__(self, sized: SizedProblem, waits: RangeWaits | None = None) -> None:
        self.sized = sized
        self.constraints, self.cluster = sized.problem.constraints, sized.problem.cluster
        self.num_ranks = self.cluster.num_ranks
        self.num_micro_batches = sized.num_micro_batches
        self.speeds = sorted(self.cluster.speeds, reverse=True)
        self.limit_bytes = max(self.cluster.memory_bytes)
        self.most_of_a_host = max(Counter(self.cluster.hosts).values())
        self.waits = waits or range_waits_of([sized])[0]
        self._rows, self._columns = sized.tables.ranges
        first = self._rows if sized.is_exact else self._rows + 1
        self._before, self._after = (table[sized.tables.ranges] for table in (self.waits.before, self.waits.after))
        self._inside = first * (sized.tables.num_segments + 1) + self._columns
        self._is_empty = np.flatnonzero(first == self._columns)

    def is_met(self, seconds: float) -> bool:
        """Returns whether there are ranks for a split of which every stage ends in so many seconds.

        Where cuts may lie inside of segments any number of stages will do, else it is the forced one.
        """
        needed = self._needed(seconds)
        needed[needed > self.num_ranks] = np.inf
        self._table[self.sized.tables.ranges] = needed
        num_stages = forced_stages(self.sized.problem) if self.sized.is_exact else 0
        return _fewest(self._table, num_stages) <= self.num_ranks

    @cached_property
    def _table(self) -> Array:
        n = self.sized.tables.num_segments
        return np.full((n + 1, n + 1), np.inf)

    def _needed(self, seconds: float) -> Array:
        """Returns the fewest replicas with which each range ends in time."""
        if not self._seconds_by_count:
            return self._needed_of_many(seconds)
        needed = np.full(len(self._rows), np.inf)
        for replicas, each in self._seconds_by_count:
            needed[each <= seconds] = replicas
        return needed

    @cached_property
    def _seconds_by_count(self) -> list[tuple[int, Array]]:
        """What each number of replicas takes, the greatest number first; of many ranks none."""
        forced = self.constraints.num_replicas
        if not forced and self.num_ranks > _FEW_RANKS:
            return []
        return [(count, self._seconds_of(count)) for count in ([forced] if forced else range(self.num_ranks, 0, -1))]

    def _needed_of_many(self, seconds: float) -> Array:
        """Returns the same by the share of the micro-batches that one replica finishes in time."""
        alone, reserved, whole_reserved = self._reserved
        spare = seconds - reserved
        share = np.maximum.reduce([way.greatest_share(spare) for way in self._ways])
        if self.sized.is_split:
            spare = seconds - whole_reserved
            share = np.minimum(share, np.maximum.reduce([way.busy_share(spare) for way in self._whole_ways]))
        with np.errstate(divide="ignore"):
            several = np.maximum(np.ceil(self.num_micro_batches / share), 2.0)
        needed = np.where((share >= 1) & (spare >= 0), several, np.inf)
        return np.where(alone <= seconds, 1.0, needed)

    @cached_property
    def _reserved(self) -> tuple[Array, Array, Array]:
        """Seconds on one replica; of several those beside the work, until gradients have left and until all is done."""
        return self._seconds_of(1), self._before + self._reduce_tail(2), self._before + self._finish_seconds(2)

    def stage_seconds(self, replicas: int) -> Array:
        """Returns the least seconds to the end of the step of each range on so many replicas, as a matrix."""
        n = self.sized.tables.num_segments
        seconds = np.full((n + 1, n + 1), np.inf)
        seconds[self._rows, self._columns] = self._seconds_of(replicas)
        return seconds

    @cached_property
    def _ways(self) -> list[RecomputeOption]:
        return [self._way(again, self.sized.urgent_work) for again in self.sized.recompute_choices]

    @cached_property
    def _whole_ways(self) -> list[RecomputeOption]:
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

    def _busy_seconds(self, way: RecomputeOption, replicas: int) -> Array:
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
        is_local = replicas <= self.most_of_a_host
        reduce = self.sized.reduce_seconds(replicas, self._trained_bytes, is_local=is_local)
        slowest = self.speeds[0] / self.speeds[min(replicas, len(self.speeds)) - 1]
        optimizer = self._optimizer * self.sized.owned_share(replicas)
        optimizer *= np.where(reduce > 0, slowest, 1.0)  # An all-reduce ends on all its ranks at once.
        return np.asarray(reduce + optimizer, dtype=np.float64)

    def _way(self, needs_recompute: bool, table: Array) -> RecomputeOption:
        sized, speed = self.sized, self.speeds[0]
        work, again = self._inner(table) / speed + sized.overhead_seconds, np.zeros(len(self._rows))
        if needs_recompute:
            forward = self._inner(sized.tables.add_up(sized.costs.forward_seconds))
            again = forward / speed + self.cluster.overhead_seconds
            again[self._columns == sized.tables.num_segments] = 0.0  # Some schedules never recompute the last stage.
        work[self._is_empty] = again[self._is_empty] = 0.0
        trip, is_full = self.waits.trip[self._columns], self.constraints.schedule == "gpipe"
        return RecomputeOption(work + again, again, trip, self._depths(needs_recompute), is_full)

    def _depths(self, needs_recompute: bool) -> Array:
        """Returns the greatest in-flight depth of each range that memory and settings allow."""
        if not self.sized.is_exact:
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
        sized, tables = self.sized, self.sized.tables
        room = self.limit_bytes * (1 + ROUNDING) - self._inner(sized.model.fixed(state_of_ranges(tables)))
        room[self._is_empty] = np.inf
        depth = np.full_like(room, np.inf)
        if sized.problem.needs_gradient and not needs_recompute:
            saved = tables.add_up(sized.greatest_costs.saved_bytes)
            with np.errstate(divide="ignore", invalid="ignore"):
                depth = np.floor(room / self._inner(saved)) + 1.0  # The last one may come as others go.
            depth[np.isnan(depth)] = np.inf
        return np.where(room >= 0, depth, 0.0)

    def _inner(self, table: Array) -> Array:
        """Returns the entries of a table for the segments that a stage of each range is sure to have whole."""
        return np.asarray(table.ravel().take(self._inside))
