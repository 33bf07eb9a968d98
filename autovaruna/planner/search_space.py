"""Lists what a search tries: places to cut, numbers of micro-batches and stages, depths, schedules, orders of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import factorial, prod

import numpy as np

from autovaruna.planner.candidate import DEEPEST
from autovaruna.planner.cut_points import cut_point_blocks, resolve_cuts
from autovaruna.planner.prediction import policy_of
from autovaruna.planner.problem import (
    FEW_RANKS,
    Problem,
    forced_stages,
    micro_batch_range,
    most_stages_per_rank,
)
from autovaruna.profiler.records import Cluster

Ranks = tuple[tuple[int, ...], ...]
"""The ordered ranks of each stage."""
MAX_SEGMENTS, MAX_SEGMENTS_OF_MANY_RANKS = 400, 1000
"""Places to cut: tables over ranges have the square of this many entries; 96 stages of 400 are not even enough."""
_MAX_COUNTS = 32
"""Of up to so many numbers of micro-batches all are tried."""
_INTERLEAVED = ("interleaved", "1f1b", "varuna")
"""Schedules of ranks with several stages, the one made for them first."""
_MOST_ORDERS = 24
"""Of uneven ranks all orders are tried if there are no more: those of four ranks that all differ."""


def cut_positions(problem: Problem) -> list[int]:
    """Returns the blocks where a stage may start, from 0, and the number of blocks at the end.

    All of them, or the forced ones, or those of cut points, or in a large graph the cheapest to cut among those near
    each even share of work.
    """
    graph = problem.graph
    n = len(graph.blocks)
    if problem.constraints.cuts:
        return [0, *resolve_cuts(graph, problem.constraints.cuts), n]
    if problem.constraints.cutpoints == "only":
        return [0, *cut_point_blocks(graph), n]
    limit = MAX_SEGMENTS if problem.cluster.num_ranks <= FEW_RANKS else MAX_SEGMENTS_OF_MANY_RANKS
    if n <= limit:
        return list(range(n + 1))
    costs = problem.cost_table.at(problem.profile.micro_batch_sizes[0])
    work = np.cumsum(costs.forward_seconds + costs.backward_seconds)
    shares = np.minimum((work / work[-1] * limit).astype(int), limit - 1)
    changes = np.zeros(n + 2)
    for value in graph.values:
        changes[value.producer + 1] += value.size.at(1)
        changes[max(value.consumers) + 1] -= value.size.at(1)
    crossing = changes.cumsum()
    positions = {0, n}
    for share in np.unique(shares[: n - 1]):
        inside = np.flatnonzero(shares[: n - 1] == share) + 1
        positions.add(int(inside[np.argmin(crossing[inside])]))
    return sorted(positions)


def micro_batch_counts(problem: Problem) -> list[int]:
    """Returns the numbers of micro-batches to try: all, or where there are many, about evenly spaced in ratio."""
    low, high = micro_batch_range(problem)
    if high - low < _MAX_COUNTS:
        return list(range(low, high + 1))
    batch, step = problem.global_batch_size, problem.cluster.num_ranks
    counts = {low, high} | {math.ceil(batch / samples) for samples in spread(1, batch // low)}
    if step <= FEW_RANKS:
        counts |= {count // step * step for count in counts} | set(spread(low, high, 1.25))
    return sorted(count for count in counts if low <= count <= high)


def spread(low: int, high: int, ratio: float = 1.12) -> list[int]:
    """Returns whole numbers from low to high, ever fewer: each at least `ratio` times the one before."""
    numbers = {low, high}
    number = float(low)
    while number < high:
        numbers.add(int(number))
        number = max(number + 1, number * ratio)
    return sorted(numbers)


def stage_limit(problem: Problem, num_segments: int) -> int:
    """Returns the greatest number of stages to try."""
    constraints = problem.constraints
    return forced_stages(problem) or min(problem.cluster.num_ranks // max(constraints.num_replicas, 1), num_segments)


def stages_per_rank(problem: Problem) -> int:
    """Returns the most stages of a rank that the search may choose.

    One, where so many stages are asked for as there are ranks for, and several were not allowed by name.
    """
    constraints = problem.constraints
    num_groups = problem.cluster.num_ranks // max(constraints.num_replicas, 1)
    has_own = 0 < forced_stages(problem) <= num_groups and constraints.max_stages_per_rank <= 1
    if constraints.stage_ranks or num_groups < 2 or has_own:
        return 1
    return most_stages_per_rank(problem)


def variants(problem: Problem, num_stages: int, is_interleaved: bool = False) -> list[tuple[str, str]]:
    """Returns the (depth, schedule) pairs to simulate."""
    constraints = problem.constraints
    depths = ["textbook"] if num_stages == 1 or constraints.in_flight else ["latency", "textbook", DEEPEST]
    if constraints.schedule != "auto":
        policy_of(constraints.schedule)
        is_full = constraints.schedule == "gpipe"
        return [(depth, constraints.schedule) for depth in (depths[:1] if is_full else depths)]
    if is_interleaved:
        depths = [depth for depth in ("textbook", "latency", DEEPEST) if depth in depths]
        return [(depth, schedule) for depth in depths for schedule in _INTERLEAVED]
    schedules = ["1f1b"]
    if problem.needs_gradient and (num_stages > 1 or constraints.recompute != "none"):
        schedules.append("varuna")
    pairs = [(depth, schedule) for schedule in schedules for depth in depths]
    return pairs + ([("textbook", "gpipe")] if num_stages > 1 and not constraints.in_flight else [])


def classes_of(cluster: Cluster) -> tuple[int, ...]:
    """Returns the class of each rank, as a number."""
    kinds = list(zip(cluster.hosts, cluster.speeds, cluster.memory_bytes, strict=True))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return tuple(numbers[kind] for kind in kinds)


def is_uniform(cluster: Cluster) -> bool:
    """Returns whether ranks differ in nothing but their hosts: those that are left over are the last of an order."""
    return len(set(cluster.speeds)) == 1 and len(set(cluster.memory_bytes)) == 1


def rank_orders(problem: Problem) -> list[list[int]]:
    """Returns orders in which stages may get the ranks: host by host, and by speed and memory where they differ.

    Where hosts have unequal numbers of ranks, those of one order that are not left over are of the largest hosts. All
    others come behind, if they are few, with ranks of one class counted as equal.
    """
    cluster = problem.cluster
    first = {host: k for k, host in reversed(list(enumerate(cluster.hosts)))}
    by_host = sorted(range(cluster.num_ranks), key=lambda rank: first[cluster.hosts[rank]])
    held, side = Counter(cluster.hosts), -1 if is_uniform(cluster) else 1
    orders = [by_host, sorted(by_host, key=lambda rank: side * held[cluster.hosts[rank]])]
    for amounts in (cluster.speeds, cluster.memory_bytes):
        if len(set(amounts)) > 1:
            rising = sorted(by_host, key=lambda rank: amounts[rank])
            falling = sorted(by_host, key=lambda rank: -amounts[rank])
            hosts = {host: sum(a for a, h in zip(amounts, cluster.hosts, strict=True) if h == host) for host in first}
            by_rising_host = sorted(rising, key=lambda rank: (hosts[cluster.hosts[rank]], first[cluster.hosts[rank]]))
            orders += [rising, falling, by_rising_host, by_rising_host[::-1]]
    classes = classes_of(cluster)
    num_orders = factorial(len(classes)) // prod(factorial(count) for count in Counter(classes).values())
    orders += _arrangements(classes) if 1 < num_orders <= _MOST_ORDERS else ()
    return [order for k, order in enumerate(orders) if order not in orders[:k]]


def _arrangements(classes: Sequence[int], begun: tuple[int, ...] = ()) -> Iterator[list[int]]:
    """Yields every order of the ranks that goes on from one, those of one class always in their own order."""
    if len(begun) == len(classes):
        yield list(begun)
    left = [rank for rank in range(len(classes)) if rank not in begun]
    for rank in {classes[rank]: rank for rank in reversed(left)}.values():
        yield from _arrangements(classes, (*begun, rank))


def layouts(problem: Problem, order: Sequence[int], replicas: Sequence[int]) -> list[Ranks]:
    """Returns the ranks of each stage: replicas next to each other, and, over several hosts, next to their neighbours.

    Between these two lie layouts of groups: q replicas of a stage, then q of the next. So a host holds part of
    a stage's replicas and part of its neighbours. The ranks that are left over are the first of an order by speed,
    and the last where all are alike.
    """
    cluster = problem.cluster
    placed = [in_a_row(problem, order, replicas)]
    if len(replicas) > 1 and replicas[0] > 1 and len(set(replicas)) == 1 and len(set(cluster.hosts)) > 1:
        ranks, largest = _used(cluster, order, sum(replicas)), max(Counter(cluster.hosts).values())
        for group in range(1, min(replicas[0], largest + 1)):
            if largest % group == 0:  # a host gets a whole number of groups
                placed.append(_fastest_first(cluster, _grouped(ranks, len(replicas), replicas[0], group)))
    return list(dict.fromkeys(placed))


def in_a_row(problem: Problem, order: Sequence[int], replicas: Sequence[int]) -> Ranks:
    """Returns the first of the layouts: the replicas of each stage next to each other."""
    ranks, ends = _used(problem.cluster, order, sum(replicas)), accumulate(replicas)
    whole = tuple(tuple(ranks[end - count : end]) for end, count in zip(ends, replicas, strict=True))
    return _fastest_first(problem.cluster, whole)


def _used(cluster: Cluster, order: Sequence[int], count: int) -> list[int]:
    return list(order[:count]) if is_uniform(cluster) else list(order[len(order) - count :])


def _grouped(ranks: Sequence[int], num_stages: int, num_replicas: int, group: int) -> Ranks:
    stages: list[list[int]] = [[] for _ in range(num_stages)]
    taken = 0
    for first in range(0, num_replicas, group):
        count = min(group, num_replicas - first)
        for stage in stages:
            stage += ranks[taken : taken + count]
            taken += count
    return tuple(tuple(stage) for stage in stages)


def _fastest_first(cluster: Cluster, ranks: Ranks) -> Ranks:
    """The first replicas may have a micro-batch more."""
    if len(set(cluster.speeds)) == 1:
        return ranks
    return tuple(tuple(sorted(stage, key=lambda rank: -cluster.speeds[rank])) for stage in ranks)
