"""Splits a chain over ranks by a formula: cuts and replicas whose longest stage is least, for ranks in some order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.placement import is_uniform
from autovaruna.planner.range_bounds import waits_of
from autovaruna.planner.ranges import Array
from autovaruna.planner.stage_memory import RecomputeOptions
from autovaruna.schedule.pipeline import share_of

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

    The last stage gets the last ranks of the order, so ranks that no stage gets are the first ones. A stage has one of
    the choices of replicas, and no more segments than the width (0: any).
    """

    def __init__(
        self,
        sized: SizedProblem,
        order: Sequence[int],
        choices: Sequence[int],
        max_stages: int,
        width: int = 0,
    ) -> None:
        self.sized, self.choices, self.max_stages = sized, sorted(choices), max_stages
        cluster, ways, n = sized.problem.cluster, sized.ways.options, sized.tables.num_segments
        # Row i of every matrix here is about the ranges i .. i, i .. i + 1, and so on, as far as the width.
        self.width = min(width or n, n)
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
        self._within = cache(self.ways.within)  # no more than depths depend on it

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
        share = -(-self.sized.num_micro_batches // replicas)
        each, first = self._message_seconds(near)
        seconds = self._within(limit, share).allowed_work(depth)
        seconds *= load
        seconds += share * self.sized.overhead_seconds
        np.maximum(seconds, share * each, out=seconds)
        seconds += self.before
        seconds += first
        seconds += self._tail(replicas, slowest, is_local=is_local)
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

    def _tail(self, replicas: int, slowest: float, *, is_local: bool) -> Array:
        """Returns the seconds of every range after its last backward, which any depth and load has."""
        key = replicas, slowest, is_local
        if key not in self._tails:
            reduce = self.sized.reduce_seconds(replicas, self.trained_bytes, is_local=is_local)
            optimizer = self.optimizer * self.sized.owned_share(replicas)
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
