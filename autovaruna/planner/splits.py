"""Splits the model and the ranks exactly, under a formula; what comes out is then ranked by simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autovaruna.planner.bounds.waits import waits_of
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.chain import partition_chain
from autovaruna.planner.groups import is_small
from autovaruna.planner.options import MAX_UNITS, spread
from autovaruna.planner.placing import Ranks, layouts, rank_orders
from autovaruna.planner.replicas import ReplicaSearch, share_of
from autovaruna.schedule import textbook_depth

Split = tuple[float, Candidate]
"""A candidate with the seconds that the formula gives it."""

_WIDEST = 4.0
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
        return self._search(count, range(unit, self.num_ranks + 1, unit), below)

    def even_splits(self, counts: Sequence[int]) -> list[tuple[float, int, int]]:
        """Returns (seconds, stages, M) of splits into even parts, best first; hardly a real one takes less."""
        stage_counts = [self.forced_stages] if self.forced_stages else self._stage_counts()
        found = []
        for count in counts:
            sized = self.planner.sized(count)
            work, greatest = float(sized.step_seconds.sum()), float(sized.step_seconds.max())
            urgent = float(sized.urgent_seconds.sum()) / work if work else 1.0
            for stages in stage_counts:
                share = -(-count // self.replicas(stages))
                part = max(work / stages, greatest)
                found.append((share * part + (work - part) * urgent, stages, count))
        fastest = max(self.problem.cluster.speeds)
        return sorted((even / fastest, stages, count) for even, stages, count in found)

    def _stage_counts(self) -> list[int]:
        """Returns few and many stages, and all that give each stage equally many replicas with few ranks left over."""
        counts = {*spread(1, self.max_stages), *(self.num_ranks // replicas for replicas in spread(1, self.num_ranks))}
        counts |= {count for count in range(1, self.num_ranks + 1) if self.num_ranks % count == 0}
        return sorted(count for count in counts if count <= self.max_stages)

    def replicas(self, num_stages: int) -> int:
        """Returns the replicas of each stage if all have equally many."""
        return self.problem.constraints.num_replicas or self.num_ranks // num_stages

    def equal_replicas(self, num_stages: int, count: int, below: float) -> Iterator[Split]:
        """Yields the best split into so many stages with equally many replicas each, if it may take less."""
        sized, segments = self.planner.sized(count), self.planner.tables.num_segments
        state = sized.model.fixed(sized.held_by(0, segments))
        if state / num_stages > max(self.problem.cluster.memory_bytes):
            return
        width = 0 if num_stages <= _WIDEST else math.ceil(segments * _WIDEST / num_stages)
        replicas = self.replicas(num_stages)
        for order in self.orders:
            for chain in ReplicaSearch(sized, order, [replicas], num_stages, width, below).chains():
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
