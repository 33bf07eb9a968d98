"""Splits a chain over ranks by a formula: cuts and replicas whose longest stage is least, for ranks in some order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autovaruna.planner.bounds.range_bounds import waits_of
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.cost_table import Array
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.exhaustive import is_small
from autovaruna.planner.memory.recompute_options import ROUNDING, RecomputeOptions, RecomputeOptionsWithin
from autovaruna.planner.placement import Ranks, is_uniform, layouts, rank_orders
from autovaruna.planner.ranges import partition_chain
from autovaruna.planner.search_space import MAX_UNITS, spread
from autovaruna.schedule.pipeline import share_of, textbook_depth

Near = tuple[bool, bool]
"""Whether the stages before and behind are on the same host."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A split: stage s starts at segment ``starts[s]`` and has ``replicas[s]`` replicas; `seconds` is its value."""

    seconds: float
    starts: tuple[int, ...]
    replicas: tuple[int, ...]


class ReplicaSearch:
    """The dynamic program for one number of micro-batches and one order of ranks.

    The last stage gets the last ranks of the order, so ranks that no stage gets are the first ones.

    Args:
        sized: the problem at M micro-batches.
        order: all ranks, in the order in which stages get them.
        choices: replica counts that a stage may have.
        max_stages: greatest number of stages.
        width: greatest number of segments of a stage; 0: any.
        below: splits of which a stage's own work takes longer are of no use.
    """

    def __init__(
        self,
        sized: SizedProblem,
        order: Sequence[int],
        choices: Sequence[int],
        max_stages: int,
        width: int = 0,
        below: float = math.inf,
    ) -> None:
        self.sized, self.choices, self.max_stages = sized, sorted(choices), max_stages
        cluster, ways, n = sized.problem.cluster, sized.ways.options, sized.tables.num_segments
        self._work, self._below = sized.tables.prefix(sized.step_seconds), below
        # Row i of every matrix here is about the ranges i .. i, i .. i + 1, and so on, as far as the width.
        self.width = min(width or n, max(map(self._widest, self.choices)))
        self.speeds = np.array([cluster.speeds[rank] for rank in order])
        self.limits = np.array([cluster.memory_bytes[rank] for rank in order])
        waits, starts = waits_of(sized), sized.tables.positions
        self.before, self.after = (each[starts[:n], None] for each in (waits.before, waits.after))
        self._waited_for = waits.messages[starts, None]
        self.optimizer = self._windows(sized.optimizer_seconds)
        self.trained_bytes = self._windows(sized.tables.trained_bytes)
        self.hosts = [cluster.hosts[rank] for rank in order]
        self._is_uniform, self._has_neighbours = is_uniform(cluster), len(set(cluster.hosts)) < len(cluster.hosts)
        self.ways = RecomputeOptions(
            tuple((self._windows(work), num_bytes.map(self._windows)) for work, num_bytes in ways)
        )
        self.costs: dict[tuple[int, int, float, float, float, bool, Near], Array] = {}
        self._messages: dict[Near, tuple[Array, Array]] = {}
        self._tails: dict[tuple[int, float, bool], Array] = {}
        self._within: dict[tuple[float, int], RecomputeOptionsWithin] = {}

    def _widest(self, replicas: int) -> int:
        """Returns the most segments of a stage whose work takes no longer than it may, 1 at least."""
        share = share_of(self.sized.num_micro_batches, replicas, 0) / max(self.sized.problem.cluster.speeds)
        ends = self._work.searchsorted(self._work + self._below / share * (1.0 + ROUNDING), side="right")
        return max(int((ends - 1 - np.arange(len(ends))).max()), 1)

    def _windows(self, table: Array) -> Array:
        """Returns a view whose row i begins with the range of segment i alone.

        What lies behind the end is of the next rows, of ranges that are empty; work is infinite there.
        """
        n, each = self.sized.tables.num_segments, table.itemsize
        assert table.shape == (n + 1, n + 1), f"a table of {n} segments has the shape {table.shape}"
        flat = np.ascontiguousarray(table).reshape(-1)
        return np.lib.stride_tricks.as_strided(flat[1:], (n, self.width), ((n + 2) * each, each), writeable=False)

    def chains(self) -> list[Chain]:
        """Returns the best split for each number of stages and of ranks that has one."""
        num_ranks, n = len(self.speeds), self.sized.tables.num_segments
        empty = np.full(n + 1, np.inf)
        empty[n] = 0.0
        best: dict[int, dict[int, Array]] = {0: {0: empty}}
        choices: dict[tuple[int, int], tuple[Array, Array]] = {}
        for used in range(1, num_ranks + 1):
            for replicas in self.choices:
                if used - replicas in best:
                    self._extend(best, choices, used, replicas)
        found = [
            self._chain(choices, used, stages, float(row[0]))
            for used, rows in best.items()
            for stages, row in rows.items()
            if stages and np.isfinite(row[0])
        ]
        return sorted(found, key=lambda chain: (chain.seconds, sum(chain.replicas)))

    def _extend(
        self,
        best: dict[int, dict[int, Array]],
        choices: dict[tuple[int, int], tuple[Array, Array]],
        used: int,
        replicas: int,
    ) -> None:
        """Puts a stage of so many replicas before every split that uses the remaining ranks."""
        costs, rest = self._costs(used, replicas), best[used - replicas]
        (n, width), every = costs.shape, np.arange(len(costs))
        rows = best.setdefault(used, {})
        for stages in [stages + 1 for stages in rest if stages < self.max_stages]:
            padded = np.concatenate([rest[stages - 1][1:], np.full(width, np.inf)])
            totals = np.maximum(costs, np.lib.stride_tricks.sliding_window_view(padded, width)[:n])
            columns = totals.argmin(axis=1)
            values = totals[every, columns]
            row = rows.setdefault(stages, np.full(n + 1, np.inf))
            better = np.flatnonzero(values < row[:n])
            row[better] = values[better]
            counts, stops = choices.setdefault((used, stages), (np.zeros(n + 1), np.zeros(n + 1)))
            counts[better], stops[better] = replicas, (every + 1 + columns)[better]
        if not any(np.isfinite(row).any() for row in rows.values()):
            del best[used]

    def _costs(self, used: int, replicas: int) -> Array:
        first = len(self.speeds) - used
        speeds = sorted(self.speeds[first : first + replicas], reverse=True)
        load = max(share_of(self.sized.num_micro_batches, replicas, k) / speed for k, speed in enumerate(speeds))
        limit = float(self.limits[first : first + replicas].min())
        is_local = len(set(self.hosts[first : first + replicas])) == 1
        near = self._is_near(first, replicas), self._is_near(first + replicas, replicas)
        key = (replicas, self._depth(used, replicas), float(load), float(speeds[-1]), limit, is_local, near)
        if key not in self.costs:
            self.costs[key] = self._build(*key)
        return self.costs[key]

    def _is_near(self, place: int, replicas: int) -> bool:
        """Returns whether a rank of the order and the one before it are on one host, or may be in some layout."""
        if replicas > 1 or self._is_uniform:
            return self._has_neighbours
        return place in (0, len(self.hosts)) or self.hosts[place - 1] == self.hosts[place]

    def _depth(self, used: int, replicas: int) -> int:
        constraints, share = self.sized.problem.constraints, -(-self.sized.num_micro_batches // replicas)
        if constraints.schedule == "gpipe":
            return share
        return min(constraints.in_flight or -(-used // replicas), share)

    def _build(
        self, replicas: int, depth: int, load: float, slowest: float, limit: float, is_local: bool, near: Near
    ) -> Array:
        """Returns the seconds of every range; `load` is the micro-batches of a replica over its speed, at most."""
        share, width = -(-self.sized.num_micro_batches // replicas), min(self.width, self._widest(replicas))
        each, first = self._message_seconds(near)
        seconds = self._allowed(limit, share, width).allowed_work(depth)
        seconds *= load
        seconds += share * self.sized.overhead_seconds
        np.maximum(seconds, share * each[:, :width], out=seconds)
        seconds += self.before
        seconds += first[:, :width]
        seconds += self._tail(replicas, slowest, width, is_local=is_local)
        return seconds

    def _message_seconds(self, near: Near) -> tuple[Array, Array]:
        """Returns what the messages of every range take: of each micro-batch, and of the first there and the last back.

        Of these two only what is not among its waits. `near` says whether the stages before and behind are on its host.
        """
        if near not in self._messages:
            cluster, held = self.sized.problem.cluster, self.sized.held
            before, behind = (cluster.local_link if is_near else cluster.remote_link for is_near in near)
            forward, backward = (each / before.bytes_per_second for each in (held.received, held.gradients_sent))
            each = np.maximum(forward, held.gradients_received / behind.bytes_per_second)
            once = forward + backward + 2 * before.latency_seconds - self._waited_for
            once = np.where(held.received > 0, np.maximum(once, 0.0), 0.0)
            self._messages[near] = self._windows(each), self._windows(once)
        return self._messages[near]

    def _allowed(self, limit: float, share: int, width: int) -> RecomputeOptionsWithin:
        """Returns how every range may run within a limit; no more than depths depend on it."""
        key = limit, share
        if key not in self._within or self._within[key].is_possible.shape[1] < width:
            self._within[key] = self.ways.up_to(width).within(limit, share)
        return self._within[key].up_to(width)

    def _tail(self, replicas: int, slowest: float, width: int, *, is_local: bool) -> Array:
        """Returns the seconds of every range after its last backward, which any depth and load has."""
        key = replicas, slowest, is_local
        if key not in self._tails:
            reduce = self.sized.reduce_seconds(replicas, self.trained_bytes[:, :width], is_local=is_local)
            optimizer = self.optimizer[:, :width] * self.sized.owned_share(replicas)
            self._tails[key] = np.maximum(self.after, reduce + optimizer / slowest)
        return self._tails[key]

    def _chain(
        self, choices: dict[tuple[int, int], tuple[Array, Array]], used: int, stages: int, seconds: float
    ) -> Chain:
        starts, replicas, at = [], [], 0
        for left in range(stages, 0, -1):
            counts, stops = choices[used, left]
            starts.append(at)
            replicas.append(int(counts[at]))
            used, at = used - replicas[-1], int(stops[at])
        return Chain(seconds, tuple(starts), tuple(replicas))


Split = tuple[float, Candidate]
"""A candidate with the seconds that the formula gives it."""


class Even(NamedTuple):
    """A split into even parts with equally many replicas, and seconds that hardly a real one takes less than."""

    seconds: float
    num_stages: int
    num_micro_batches: int
    num_replicas: int


_WIDEST = 4.0
_WORTH_LEAVING_OUT = 0.95
"""What fewer replicas have to save of a step before these are tried, by what all-reduces of even parts take."""
_CELLS = 10**8
"""With few enough cells of the dynamic program every order of the ranks is tried, unless all plans are tried later."""


class Splitter:
    """Finds the best splits for a number of micro-batches.

    Args:
        planner: of the problem.
        max_stages: greatest number of stages.
        forced_stages: the only number of stages; 0: any.
        num_counts: for how many numbers of micro-batches it is asked.
    """

    def __init__(self, planner: Planner, max_stages: int, forced_stages: int, num_counts: int) -> None:
        self.planner, self.problem = planner, planner.problem
        self.max_stages, self.forced_stages = max_stages, forced_stages
        self.num_ranks = self.problem.cluster.num_ranks
        self.has_many_ranks = self.num_ranks > MAX_UNITS
        cells = (self.num_ranks * self.planner.tables.num_segments) ** 2 * num_counts
        has_few_orders = self.has_many_ranks or is_small(self.problem, self.planner.tables.num_segments)
        self.orders = rank_orders(self.problem, 0 if has_few_orders else _CELLS // cells)

    def splits(self, count: int) -> Iterator[Split]:
        """Yields the best split of each number of stages and ranks."""
        if self.problem.constraints.stage_ranks:
            return self.for_ranks(count, self.problem.constraints.stage_ranks)
        forced = self.problem.constraints.num_replicas
        return self._search(count, [forced] if forced else range(1, self.num_ranks + 1))

    def unequal_replicas(self, count: int, below: float) -> Iterator[Split]:
        """Yields splits whose replica counts are multiples of a twelfth of many ranks, if they may take less."""
        if self.problem.constraints.num_replicas:
            return iter(())
        unit = math.ceil(self.num_ranks / MAX_UNITS)
        choices = {min(choice, count) for choice in range(unit, self.num_ranks + 1, unit)}
        return self._search(count, sorted(choices), below)

    def even_splits(self, counts: Sequence[int]) -> list[Even]:
        """Returns splits into even parts, best first, on all ranks that have something to do."""
        return sorted(even for even, _ in self._evens(counts))

    def smaller_splits(self, counts: Sequence[int]) -> list[Even]:
        """Returns splits into even parts with fewer replicas, best first, where all-reduces of all take too long."""
        if self.problem.constraints.num_replicas or not self.problem.needs_gradient:
            return []
        found = (self._with_fewer(even, part_seconds) for even, part_seconds in self._evens(counts))
        return [even for _, even in sorted(each for each in found if each)]

    def _evens(self, counts: Sequence[int]) -> Iterator[tuple[Even, float]]:
        """Yields splits into even parts, with what a part takes for a micro-batch."""
        stage_counts = [self.forced_stages] if self.forced_stages else self._stage_counts()
        fastest = max(self.problem.cluster.speeds)
        for count in counts:
            sized = self.planner.sized(count)
            work, greatest = float(sized.step_seconds.sum()), float(sized.step_seconds.max())
            urgent = float(sized.urgent_seconds.sum()) / work if work else 1.0
            for stages in stage_counts:
                part = max(work / stages, greatest)
                replicas = self.problem.constraints.num_replicas or min(self.num_ranks // stages, count)
                seconds = -(-count // replicas) * part + (work - part) * urgent
                yield Even(seconds / fastest, stages, count, replicas), part / fastest

    def _with_fewer(self, even: Even, part_seconds: float) -> tuple[float, Even] | None:
        """Returns a split with the best fewer replicas, and before it its seconds with an all-reduce; None: no gain."""
        _, num_stages, count, most = even
        tables = self.planner.tables
        tried, latency, seconds_per_byte = self._rings
        trained = float(tables.trained_bytes[0, tables.num_segments]) / num_stages
        seconds = -(-count // tried) * part_seconds + latency + seconds_per_byte * trained
        best = int(np.where(tried <= most, seconds, math.inf).argmin())
        last = int(np.searchsorted(tried, most, side="right")) - 1
        if seconds[best] >= _WORTH_LEAVING_OUT * seconds[last]:
            return None
        replicas = int(tried[best])
        more = (math.ceil(count / replicas) - math.ceil(count / most)) * part_seconds
        return float(seconds[best]), Even(even.seconds + more, num_stages, count, replicas)

    @cached_property
    def _rings(self) -> tuple[Array, Array, Array]:
        """Numbers of replicas, and what an all-reduce takes on as many ranks: once, and for each byte."""
        cluster, all_reduces = self.problem.cluster, self.planner.sized(1).all_reduces
        largest = max(Counter(cluster.hosts).values())
        on_a_host = [count for count in range(1, largest + 1) if largest % count == 0]
        tried = sorted({*spread(1, self.num_ranks), *on_a_host})
        costs = [all_reduces.cost(count, is_local=largest % count == 0) for count in tried]
        latency, seconds_per_byte = zip(*costs, strict=True)
        return np.array(tried), np.array(latency), np.array(seconds_per_byte)

    def _stage_counts(self) -> list[int]:
        """Returns few and many stages, and all that give each stage equally many replicas with few ranks left over."""
        counts = {*spread(1, self.max_stages), *(self.num_ranks // replicas for replicas in spread(1, self.num_ranks))}
        counts |= {count for count in range(1, self.num_ranks + 1) if self.num_ranks % count == 0}
        return sorted(count for count in counts if count <= self.max_stages)

    def equal_replicas(self, even: Even, below: float) -> Iterator[Split]:
        """Yields the best split into so many stages with equally many replicas each, if it may take less."""
        num_stages, count = even.num_stages, even.num_micro_batches
        sized, segments = self.planner.sized(count), self.planner.tables.num_segments
        state = sized.model.fixed(sized.held_by(0, segments))
        if state / num_stages > max(self.problem.cluster.memory_bytes):
            return
        width = 0 if num_stages <= _WIDEST else math.ceil(segments * _WIDEST / num_stages)
        for order in self.orders:
            search = ReplicaSearch(sized, order, [even.num_replicas], num_stages, width, below)
            for chain in search.chains():
                if len(chain.starts) == num_stages:
                    for ranks in layouts(self.problem, order, chain.replicas):
                        yield chain.seconds, Candidate(chain.starts, ranks, count)

    def _search(self, count: int, choices: Sequence[int], below: float = math.inf) -> Iterator[Split]:
        sized = self.planner.sized(count)
        most = min(self.max_stages, self.num_ranks // min(choices))
        for order in self.orders:
            for chain in ReplicaSearch(sized, order, choices, most, below=below).chains():
                if self.forced_stages in (0, len(chain.starts)):
                    for ranks in layouts(self.problem, order, chain.replicas):
                        yield chain.seconds, Candidate(chain.starts, ranks, count)

    def for_ranks(self, count: int, stage_ranks: Ranks) -> Iterator[Split]:
        """Yields the best split for some ranks; a rank with several stages gives each its share of time and memory."""
        sized, cluster = self.planner.sized(count), self.problem.cluster
        counts = [len(ranks) for ranks in stage_ranks]
        each = waits_of(sized)
        waits = (each.before + each.after)[sized.tables.positions, None]
        costs = []
        for stage, ranks in enumerate(stage_ranks):
            shared = max(sum(rank in others for others in stage_ranks) for rank in ranks)
            speeds = [cluster.speeds[rank] for rank in ranks]
            load = max(share_of(count, len(ranks), k) / speed for k, speed in enumerate(speeds))
            limit = min(cluster.memory_bytes[rank] for rank in ranks) / shared
            share = -(-count // len(ranks))
            depth = min(textbook_depth(len(counts), stage, counts), share)
            costs.append(sized.ways.within(limit, share).allowed_work(depth) * load * shared + waits)
        split = partition_chain(costs) or partition_chain([sized.work] * len(counts))
        if split:
            yield split.objective, Candidate(split.starts, stage_ranks, count)


def varied(evens: Sequence[Even]) -> list[Even]:
    """Returns the splits so that each number of stages and replicas comes once before any comes twice."""
    turns = Counter[tuple[int, int]]()
    keyed = []
    for even in sorted(evens):
        kind = even.num_stages, even.num_replicas
        keyed.append((turns[kind], even))
        turns[kind] += 1
    return [even for _, even in sorted(keyed)]
