"""Lists all regular grids of stages, replicas and micro-batches, and cuts the model for each by a formula."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autovaruna.planner.bounds.range_bounds import waits_of
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.placement import Ranks, in_a_row, layouts, rank_orders
from autovaruna.planner.problem import Problem, forced_stages, micro_batch_range
from autovaruna.planner.ranges import partition_chain
from autovaruna.planner.records import Plan
from autovaruna.planner.search_space import MAX_UNITS, stage_limit
from autovaruna.planner.splits import ReplicaSearch
from autovaruna.schedule.pipeline import share_of, textbook_depth

_MOST_GRIDS = 24
"""Up to so many stages every number of them is tried; of more, some that are evenly spaced in ratio."""
_MOST_ORDERS = 24
"""Of uneven ranks every order is tried if there are no more than these."""
_WIDEST = 4.0
"""Times the segments of an even stage that a stage may have."""


class Grid(NamedTuple):
    """A regular grid: S stages of equally many replicas, and M."""

    num_stages: int
    num_replicas: int
    num_micro_batches: int


@dataclass(frozen=True)
class Choice:
    """The best plan of a regular grid; `micro_batch_size` is its greatest."""

    num_stages: int
    num_replicas: int
    micro_batch_size: int
    plan: Plan
    samples_per_second: float
    memory_bytes: float

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.plan.predicted_seconds


def choice_of(plan: Plan, global_batch_size: int) -> Choice:
    """Returns the row of a plan with equally many replicas."""
    size, rate = math.ceil(plan.micro_batch_size - 1e-9), math.inf
    if plan.predicted_seconds > 0:
        rate = global_batch_size / plan.predicted_seconds
    return Choice(plan.num_stages, len(plan.stages[0].ranks), size, plan, rate, max(plan.rank_bytes()))


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
    """Returns numbers of micro-batches whose sizes are powers of two, equally many for each replica where that may be.

    As far as they are allowed, that is.
    """
    low, high = micro_batch_range(problem)
    sizes = (2**k for k in range(problem.global_batch_size.bit_length()))
    shares = {math.ceil(problem.global_batch_size / (size * num_replicas)) for size in sizes}
    least, most = math.ceil(low / num_replicas), high // num_replicas
    if least > most:
        return [low]
    return sorted({num_replicas * min(max(share, least), most) for share in shares})


def cut_grids(planner: Planner, grids: Sequence[Grid]) -> Iterator[tuple[Grid, list[Candidate]]]:
    """Yields each grid with its candidates: cuts by the formula, in several orders and layouts of ranks."""
    problem, segments = planner.problem, planner.tables.num_segments
    orders = rank_orders(problem, _MOST_ORDERS)
    alike: dict[tuple[int, int], list[Grid]] = {}
    for grid in grids:
        alike.setdefault(grid[1:], []).append(grid)
    for (replicas, count), some in alike.items():
        sized = planner.sized(count)
        state = sized.model.fixed(sized.held_by(0, segments)) / max(problem.cluster.memory_bytes)
        wanted = {grid.num_stages: grid for grid in some if grid.num_stages >= state}
        found: dict[Grid, list[tuple[float, Candidate]]] = {}
        for stages, order in ((s, order) for s in _runs(wanted) for order in orders):
            width = 0 if stages[0] <= _WIDEST else math.ceil(segments * _WIDEST / stages[0])
            for chain in ReplicaSearch(sized, order, [replicas], stages[-1], width).chains():
                if len(chain.starts) in stages:
                    own = found.setdefault(wanted[len(chain.starts)], [])
                    own += [
                        (chain.seconds, Candidate(chain.starts, ranks, count))
                        for ranks in layouts(problem, order, chain.replicas)
                    ]
        for (
            grid
        ) in wanted.values():  # A replica with fewer micro-batches may have less memory than the formula asks for.
            if grid not in found:
                ranks = in_a_row(problem, orders[0], [replicas] * grid.num_stages)
                even = cut_for_ranks(planner, count, ranks) if grid.num_stages <= _MOST_GRIDS else None
                found[grid] = [(math.inf, even)] if even else []
        for grid, own in found.items():
            yield grid, [candidate for _, candidate in sorted(own, key=lambda each: each[0])]


def unequal_replicas(planner: Planner, count: int, below: float) -> Iterator[Candidate]:
    """Yields the best split of each number of stages and ranks, by the formula, for M micro-batches.

    Of many ranks, replicas are multiples of a part of them.

    Args:
        planner: of the problem.
        count: M.
        below: splits that take as many seconds by the formula are of no use.
    """
    problem, num_ranks = planner.problem, planner.problem.cluster.num_ranks
    forced, unit = forced_stages(problem), math.ceil(num_ranks / MAX_UNITS)
    choices = sorted({min(choice, count) for choice in range(unit, num_ranks + 1, unit)})
    most = min(stage_limit(problem, planner.tables.num_segments), num_ranks // choices[0])
    for order in rank_orders(problem, _MOST_ORDERS):
        for chain in ReplicaSearch(planner.sized(count), order, choices, most).chains():
            if chain.seconds < below and forced in (0, len(chain.starts)):
                for ranks in layouts(problem, order, chain.replicas):
                    yield Candidate(chain.starts, ranks, count)


def _runs(stages: Sequence[int] | dict[int, Grid]) -> list[list[int]]:
    """Returns numbers of stages that are cut together: none is more than twice another."""
    runs: list[list[int]] = []
    for count in sorted(stages):
        if runs and count <= 2 * runs[-1][0]:
            runs[-1].append(count)
        else:
            runs.append([count])
    return runs


def cut_for_ranks(planner: Planner, count: int, stage_ranks: Ranks) -> Candidate | None:
    """Returns the best cuts for some ranks; a rank with several stages gives each its share of time and memory."""
    sized, cluster = planner.sized(count), planner.problem.cluster
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
    return Candidate(split.starts, stage_ranks, count) if split else None
