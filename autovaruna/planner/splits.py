"""Splits the model and the ranks exactly, under a formula; what comes out is then ranked by simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autovaruna.planner.bounds.waits import waits_of
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.chain import partition_chain
from autovaruna.planner.costs import Array
from autovaruna.planner.groups import is_small
from autovaruna.planner.options import MAX_UNITS, spread
from autovaruna.planner.placing import Ranks, layouts, rank_orders
from autovaruna.planner.replicas import ReplicaSearch
from autovaruna.schedule import textbook_depth
from autovaruna.schedule.slices import share_of

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
