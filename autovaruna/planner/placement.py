"""Lays ranks out over stages: orders of uneven ranks, and layouts over hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, permutations, product
from math import factorial, prod

from autovaruna.planner.problem import FEW_RANKS, Problem
from autovaruna.profiler.records import Cluster

Ranks = tuple[tuple[int, ...], ...]
"""The ordered ranks of each stage."""
_MOST_ORDERS = 24
"""Of uneven ranks all orders are tried if there are no more: those of four ranks that all differ."""


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


def changed_ranks(problem: Problem, ranks: Ranks) -> Iterator[Ranks]:
    """Yields assignments that differ little: two stages or ranks change places, or one rank goes to another stage.

    Idle ranks are one more stage; one rank of each class stands for all of a stage.
    """
    constraints, cluster = problem.constraints, problem.cluster
    if constraints.stage_ranks:
        return
    classes, num_stages = classes_of(cluster), len(ranks)
    used = {rank for stage in ranks for rank in stage}
    groups = (*ranks, tuple(rank for rank in range(cluster.num_ranks) if rank not in used))
    some = [tuple({classes[rank]: rank for rank in group}.values()) for group in groups]
    for s, t in combinations(range(num_stages) if len(set(classes)) > 1 and num_stages <= FEW_RANKS else (), 2):
        if len(ranks[s]) == len(ranks[t]):  # stages that share a parameter want to share a host
            yield tuple(ranks[{s: t, t: s}.get(k, k)] for k in range(num_stages))
    for s, t in combinations(range(num_stages + 1), 2):
        for one, other in product(some[s], some[t]):
            if classes[one] != classes[other]:
                yield tuple(tuple({one: other, other: one}.get(rank, rank) for rank in stage) for stage in ranks)
    for s, t in permutations((num_stages, *range(num_stages)), 2) if not constraints.num_replicas else ():
        is_left = s == num_stages or len(groups[s]) > 1  # a stage keeps a rank
        for rank in some[s] if is_left else ():
            moved = [tuple(each for each in group if each != rank) for group in groups]
            yield tuple((*moved[k], rank) if k == t else moved[k] for k in range(num_stages))


def fewer_replicas(problem: Problem, ranks: Ranks) -> Iterator[Ranks]:
    """Yields the first replicas of every stage alone: of many ranks all-reduces may take longer than they save."""
    counts = set(map(len, ranks))
    if not (problem.constraints.num_replicas or problem.constraints.stage_ranks) and len(counts) == 1:
        most = counts.pop()
        for count in sorted({most // 2, most * 3 // 4, most - 1} - {0, most}):
            yield tuple(stage[:count] for stage in ranks)
