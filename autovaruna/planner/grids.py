"""Lists all regular grids of stages, replicas and micro-batches, and cuts the model for each by a formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.cost_table import Array
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.cuts import even_starts, partition_chain
from autovaruna.planner.placement import Ranks, in_a_row, is_uniform, layouts, rank_orders
from autovaruna.planner.problem import Problem, forced_stages, micro_batch_range
from autovaruna.planner.search_space import MAX_UNITS, micro_batch_counts, stage_limit
from autovaruna.planner.stage_memory import OptionsWithin
from autovaruna.schedule.pipeline import share_of, textbook_depth

_MOST_GRIDS = 24
"""Up to so many stages every number of them is tried; of more, some that are evenly spaced in ratio."""
_FEW_RANKS = 4
"""Of which every split into groups is tried in tiny problems."""
_MOST_ORDERS = 24
"""Of uneven ranks every order is tried if there are no more than these."""
_MOST_PLANS = 2**15
"""If ranks and segments are split over stages in no more ways than these, for all orders and M, each is tried."""
_CELLS = 10**7
"""With more cells of the dynamic program stages of even work are enough, if they fit."""
_WIDEST = 4.0
"""Times the segments of an even stage that a stage may have."""


class Grid(NamedTuple):
    """A regular grid: S stages of equally many replicas, and M."""

    num_stages: int
    num_replicas: int
    num_micro_batches: int


def grids_of(problem: Problem, num_segments: int) -> list[Grid]:
    """Returns all regular grids with one stage a rank.

    Replicas are as many as there are ranks and samples for; micro-batches are of 1, 2, 4, ... samples.
    """
    forced, most = forced_stages(problem), stage_limit(problem, num_segments)
    num_ranks, replicas = problem.cluster.num_ranks, problem.constraints.num_replicas
    high, found = micro_batch_range(problem)[1], set[Grid]()
    for num_stages in [forced] if forced else _spread(most, num_ranks):
        each = replicas or min(num_ranks // num_stages, high)
        if each and each * num_stages <= num_ranks:
            found |= {Grid(num_stages, each, count) for count in even_counts(problem, each)}
    return sorted(found)


def _spread(most: int, num_ranks: int) -> list[int]:
    """Returns all numbers of stages, or of many those that leave no rank over and others, evenly spaced in ratio."""
    if most <= _MOST_GRIDS:
        return list(range(1, most + 1))
    spread = {round(most ** (k / (_MOST_GRIDS - 1))) for k in range(_MOST_GRIDS)}
    return sorted(spread | {count for count in range(1, most + 1) if num_ranks % count == 0})


def even_counts(problem: Problem, num_replicas: int = 1) -> list[int]:
    """Returns the allowed M whose sizes are powers of two, equally many for each replica where that may be.

    One sample each is always among them: of equally many for each replica some may hold two, and need more memory.
    """
    low, high = micro_batch_range(problem)
    sizes = (2**k for k in range(problem.global_batch_size.bit_length() + 1))  # the last one is the whole batch
    shares = {math.ceil(problem.global_batch_size / (size * num_replicas)) for size in sizes}
    least, most = math.ceil(low / num_replicas), high // num_replicas
    if least > most:
        return [low]
    of_one = {high} if high == problem.global_batch_size else set()
    return sorted(of_one | {num_replicas * min(max(share, least), most) for share in shares})


def even_seconds(planner: Planner, grid: Grid) -> float:
    """Returns seconds that hardly any cuts of a grid take less than: those of even stages, with all memory."""
    sized = planner.sized(grid.num_micro_batches)
    work, urgent = float(sized.step_seconds.sum()), float(sized.urgent_seconds.sum())
    part = max(work / grid.num_stages, float(sized.step_seconds.max()))
    fill = (work - part) * (urgent / work if work else 1.0)
    share = share_of(grid.num_micro_batches, grid.num_replicas, 0)
    return (share * part + fill) / max(planner.problem.cluster.speeds)


def groups_of(planner: Planner) -> Iterator[tuple[float, Ranks, int]]:
    """Yields about the seconds, groups of equally many ranks, and M.

    Of tiny problems they come in every order, with every M, and of few ranks in unequal groups, too.
    """
    problem = planner.problem
    num_ranks, forced = problem.cluster.num_ranks, problem.constraints.num_replicas
    counts, most = (micro_batch_counts(problem), _MOST_ORDERS) if planner.is_tiny else (even_counts(problem), 0)
    orders = rank_orders(problem, most) if planner.is_tiny else rank_orders(problem)[:1]
    unequal = list(_splits(num_ranks)) if planner.is_tiny and not forced and num_ranks <= _FEW_RANKS else []
    for order, count in product(orders, counts):
        even = [(min(forced or num_ranks // number, count),) * number for number in range(2, num_ranks + 1)]
        for replicas in dict.fromkeys([*even, *unequal]):
            if len(replicas) > 1 and sum(replicas) <= num_ranks and max(replicas) <= count:
                work = count * float(planner.sized(count).step_seconds.sum()) / max(problem.cluster.speeds)
                yield work / sum(replicas), in_a_row(problem, order, replicas), count


def cut_grids(
    planner: Planner, grids: Sequence[Grid], is_open: Callable[[Grid], bool]
) -> Iterator[tuple[Grid, list[Candidate]]]:
    """Yields grids that are open, with cuts by the formula in several orders and layouts of ranks; the best first."""
    alike: dict[tuple[int, int], list[Grid]] = {}
    for grid in sorted(grids, key=lambda grid: even_seconds(planner, grid)):
        alike.setdefault(grid[1:], []).append(grid)
    for (_, count), some in alike.items():
        fewest = _fewest_stages(planner, count)
        for run in _runs([grid for grid in some if grid.num_stages >= fewest]):
            wanted = [grid for grid in run if is_open(grid)]
            yield from _cut_run(planner, wanted) if wanted else ()


def _fewest_stages(planner: Planner, count: int) -> float:
    sized = planner.sized(count)
    state = sized.model.fixed(sized.held_by(0, planner.tables.num_segments))
    return state / max(planner.problem.cluster.memory_bytes)


def _cut_run(planner: Planner, grids: Sequence[Grid]) -> Iterator[tuple[Grid, list[Candidate]]]:
    """Yields grids that differ in their stages alone with their candidates."""
    problem, segments = planner.problem, planner.tables.num_segments
    orders, wanted = rank_orders(problem, _MOST_ORDERS), {grid.num_stages: grid for grid in grids}
    replicas, count = grids[0][1:]
    work = planner.tables.prefix(planner.sized(count).step_seconds)
    width = 0 if min(wanted) <= _WIDEST else math.ceil(segments * _WIDEST / min(wanted))
    found: dict[Grid, list[tuple[float, Candidate]]] = {grid: [] for grid in grids}
    for order in orders:
        evens = list[Candidate]()
        for grid in grids:
            places = layouts(problem, order, [replicas] * grid.num_stages)
            some = [Candidate(even_starts(work, grid.num_stages), ranks, count) for ranks in places]
            found[grid] += [(0.0, candidate) for candidate in some]
            evens.append(some[0])
        is_quick = max(wanted) * segments**2 <= _CELLS
        if not is_quick and all(map(planner.build, evens)):
            continue
        for chain in ReplicaSearch(planner.sized(count), order, [replicas], max(wanted), width).chains():
            if len(chain.starts) in wanted:
                found[wanted[len(chain.starts)]] += [
                    (chain.seconds, Candidate(chain.starts, ranks, count))
                    for ranks in layouts(problem, order, chain.replicas)
                ]
    for grid, own in found.items():
        if grid.num_stages <= _MOST_GRIDS and not any(seconds for seconds, _ in own):
            # A replica with fewer micro-batches may have less memory than the formula asks for.
            suited = cut_for_ranks(planner, count, in_a_row(problem, orders[0], [replicas] * grid.num_stages))
            own += [(math.inf, suited)] if suited else []
        yield grid, list(dict.fromkeys(candidate for _, candidate in sorted(own, key=lambda each: each[0])))


def unequal_replicas(planner: Planner, count: int, below: float) -> Iterator[Candidate]:
    """Yields the best split of each number of stages and ranks, by the formula, for M micro-batches, or of few all.

    Of many ranks, replicas are multiples of a part of them. Splits that take `below` by the formula are left out.
    """
    problem, num_ranks = planner.problem, planner.problem.cluster.num_ranks
    forced, unit = forced_stages(problem), math.ceil(num_ranks / MAX_UNITS)
    choices = sorted({min(choice, count) for choice in range(unit, num_ranks + 1, unit)})
    most = min(stage_limit(problem, planner.tables.num_segments), num_ranks // choices[0])
    if most < _fewest_stages(planner, count):
        return
    orders = rank_orders(problem, _MOST_ORDERS)
    segments = planner.tables.num_segments
    if 2 ** (num_ranks + segments) * len(orders) * len(micro_batch_counts(problem)) <= _MOST_PLANS:
        for order, replicas in product(orders, _splits(num_ranks)):
            if forced in (0, len(replicas)) and len(replicas) <= most and max(replicas) <= count:
                ranks = in_a_row(problem, order, replicas)
                for inner in combinations(range(1, segments), len(replicas) - 1):
                    yield Candidate((0, *inner), ranks, count)
        return
    for order in orders:
        for chain in ReplicaSearch(planner.sized(count), order, choices, most).chains():
            if chain.seconds < below and forced in (0, len(chain.starts)):
                for ranks in layouts(problem, order, chain.replicas):
                    yield Candidate(chain.starts, ranks, count)


def _splits(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields all numbers of replicas of stages that use so many ranks, or fewer."""
    for used in range(1, num_ranks + 1):
        for inner in (inner for number in range(used) for inner in combinations(range(1, used), number)):
            yield tuple(behind - first for first, behind in pairwise((0, *inner, used)))


def _runs(grids: Sequence[Grid]) -> list[list[Grid]]:
    """Returns grids that are cut together: none has more than twice the stages of another."""
    runs: list[list[Grid]] = []
    for grid in sorted(grids):
        if runs and grid.num_stages <= 2 * runs[-1][0].num_stages:
            runs[-1].append(grid)
        else:
            runs.append([grid])
    return runs


def cut_for_ranks(planner: Planner, count: int, stage_ranks: Ranks) -> Candidate | None:
    """Returns the best cuts for some ranks; a rank with several stages gives each its share of time and memory."""
    sized, cluster = planner.sized(count), planner.problem.cluster
    counts = [len(ranks) for ranks in stage_ranks]
    each = sized.waits
    waits = (each.before + each.after)[sized.tables.positions, None]
    costs = []
    for stage, ranks in enumerate(stage_ranks):
        shared = max(sum(rank in others for others in stage_ranks) for rank in ranks)
        speeds = [cluster.speeds[rank] for rank in ranks]
        load = max(share_of(count, len(ranks), k) / speed for k, speed in enumerate(speeds))
        limit = min(cluster.memory_bytes[rank] for rank in ranks) / shared
        share = -(-count // len(ranks))
        depth = min(textbook_depth(len(counts), stage, counts), share)
        costs.append(OptionsWithin.of(sized.ways, limit, share).allowed_work(depth) * load * shared + waits)
    split = partition_chain(costs) or partition_chain([sized.work] * len(counts))
    return Candidate(split.starts, stage_ranks, count) if split else None


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
        self, sized: SizedProblem, order: Sequence[int], choices: Sequence[int], max_stages: int, width: int = 0
    ) -> None:
        self.sized, self.choices, self.max_stages = sized, sorted(choices), max_stages
        cluster, n = sized.problem.cluster, sized.tables.num_segments
        # Row i of every matrix here is about the ranges i .. i, i .. i + 1, and so on, as far as the width.
        self.width = min(width or n, n)
        self.speeds = np.array([cluster.speeds[rank] for rank in order])
        self.limits = np.array([cluster.memory_bytes[rank] for rank in order])
        waits, starts = sized.waits, sized.tables.positions
        self.before, self.after = (each[starts[:n], None] for each in (waits.before, waits.after))
        self._waited_for = waits.messages[starts, None]
        self.optimizer = self._windows(sized.optimizer_seconds)
        self.trained_bytes = self._windows(sized.tables.trained_bytes)
        self.hosts = [cluster.hosts[rank] for rank in order]
        self._is_uniform, self._has_neighbours = is_uniform(cluster), len(set(cluster.hosts)) < len(cluster.hosts)
        self.ways = [(self._windows(work), num_bytes.map(self._windows)) for work, num_bytes in sized.ways]
        self.costs: dict[tuple[int, int, float, float, float, bool, Near], Array] = {}
        self._messages: dict[Near, tuple[Array, Array]] = {}
        self._tails: dict[tuple[int, float, bool], Array] = {}
        self._within = cache(partial(OptionsWithin.of, self.ways))  # no more than depths depend on it

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
