"""Lays ranks out over stages: orders of uneven ranks, and layouts over hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from math import factorial, prod

from autovaruna.planner.problem import Problem
from autovaruna.profiler.records import Cluster

Ranks = tuple[tuple[int, ...], ...]
"""The ordered ranks of each stage."""

_FEW_RANKS = 16


def classes_of(cluster: Cluster) -> tuple[int, ...]:
    """Returns the class of each rank, as a number."""
    kinds = list(zip(cluster.hosts, cluster.speeds, cluster.memory_bytes, strict=True))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return tuple(numbers[kind] for kind in kinds)


def is_uniform(cluster: Cluster) -> bool:
    """Returns whether ranks differ in nothing but their hosts: those that are left over are the last of an order."""
    return len(set(cluster.speeds)) == 1 and len(set(cluster.memory_bytes)) == 1


def rank_orders(problem: Problem, most: int = 0) -> list[list[int]]:
    """Returns orders in which stages may get the ranks: host by host, and by speed and memory where they differ.

    Where hosts have unequal numbers of ranks, those of one order that are not left over are of the largest hosts. If
    there are no more than `most` orders, counting ranks of one class as equal, it is all of them.
    """
    cluster = problem.cluster
    classes = classes_of(cluster)
    num_orders = factorial(len(classes)) // prod(factorial(count) for count in Counter(classes).values())
    if 1 < num_orders <= most:
        return list(_arrangements(classes))
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
    return [order for k, order in enumerate(orders) if order not in orders[:k]]


def _arrangements(classes: Sequence[int]) -> Iterator[list[int]]:
    """Yields every order of the ranks, those of one class always in their own order."""
    members = {number: [rank for rank, kind in enumerate(classes) if kind == number] for number in set(classes)}

    def extend(order: list[int]) -> Iterator[list[int]]:
        if len(order) == len(classes):
            yield order
        for own in members.values():
            following = next((rank for rank in own if rank not in order), None)
            if following is not None:
                yield from extend([*order, following])

    return extend([])


def layouts(problem: Problem, order: Sequence[int], replicas: Sequence[int]) -> list[Ranks]:
    """Returns the ranks of each stage: replicas next to each other, and, over several hosts, next to their neighbours.

    Between these two lie layouts of groups: q replicas of a stage, then q of the next. So a host holds part of
    a stage's replicas and part of its neighbours. The ranks that are left over are the first of an order by speed,
    and the last where all are alike.
    """
    cluster = problem.cluster
    placed = [in_a_row(problem, order, replicas)]
    if len(replicas) > 1 and replicas[0] > 1 and len(set(replicas)) == 1 and len(set(cluster.hosts)) > 1:
        ranks = _used(cluster, order, sum(replicas))
        grouped = (_grouped(ranks, len(replicas), replicas[0], group) for group in _groups(cluster, replicas[0]))
        placed += [_fastest_first(cluster, each) for each in grouped]
    return list(dict.fromkeys(placed))


def in_a_row(problem: Problem, order: Sequence[int], replicas: Sequence[int]) -> Ranks:
    """Returns the first of the layouts: the replicas of each stage next to each other."""
    ranks, ends = _used(problem.cluster, order, sum(replicas)), accumulate(replicas)
    whole = tuple(tuple(ranks[end - count : end]) for end, count in zip(ends, replicas, strict=True))
    return _fastest_first(problem.cluster, whole)


def _used(cluster: Cluster, order: Sequence[int], count: int) -> list[int]:
    return list(order[:count]) if is_uniform(cluster) else list(order[len(order) - count :])


def _groups(cluster: Cluster, num_replicas: int) -> list[int]:
    """Returns sizes of groups: 1, and those that give a host a whole number of groups."""
    largest = max(Counter(cluster.hosts).values())
    few = cluster.num_ranks <= _FEW_RANKS
    return [q for q in range(1, min(num_replicas, largest + 1)) if q == 1 or few or largest % q == 0]


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
    """Yields assignments that differ little: two ranks change places, or one rank changes its stage."""
    constraints, cluster = problem.constraints, problem.cluster
    if constraints.stage_ranks:
        return
    classes, idle = classes_of(cluster), sorted(set(range(cluster.num_ranks)) - {r for stage in ranks for r in stage})
    if len(set(classes)) > 1:
        yield from _exchanges(ranks)
        yield from _swaps(cluster, classes, ranks, idle)
    if not constraints.num_replicas:
        yield from _moves(classes, ranks, idle)


def fewer_replicas(problem: Problem, ranks: Ranks) -> Iterator[Ranks]:
    """Yields the first replicas of every stage alone: of many ranks all-reduces may take longer than they save."""
    counts = set(map(len, ranks))
    if not (problem.constraints.num_replicas or problem.constraints.stage_ranks) and len(counts) == 1:
        most = counts.pop()
        for count in sorted({most // 2, most * 3 // 4, most - 1} - {0, most}):
            yield tuple(stage[:count] for stage in ranks)


def _exchanges(ranks: Ranks) -> Iterator[Ranks]:
    """Yields each exchange of all ranks of two stages: those that share a parameter want to share a host."""
    for s, t in combinations(range(len(ranks)) if len(ranks) <= _FEW_RANKS else (), 2):
        if len(ranks[s]) == len(ranks[t]):
            yield tuple(ranks[t] if k == s else ranks[s] if k == t else each for k, each in enumerate(ranks))


def _swaps(cluster: Cluster, classes: Sequence[int], ranks: Ranks, idle: Sequence[int]) -> Iterator[Ranks]:
    """Yields each exchange of two ranks of different classes; of a large cluster one for each pair of classes."""
    places = [(s, i) for s, stage in enumerate(ranks) for i in range(len(stage))]
    known: set[tuple[int, ...]] = set()
    is_large = cluster.num_ranks > _FEW_RANKS
    for (s, i), (t, j) in combinations(places, 2):
        one, other = ranks[s][i], ranks[t][j]
        kind = (s, t, classes[one], classes[other])
        if classes[one] == classes[other] or (is_large and (s == t or kind in known)):
            continue
        known.add(kind)
        yield _put(_put(ranks, s, i, other), t, j, one)
    for s, i in places:
        for rank in idle:
            kind = (s, -1, classes[ranks[s][i]], classes[rank])
            if classes[rank] != classes[ranks[s][i]] and kind not in known:
                known.add(kind)
                yield _put(ranks, s, i, rank)


def _moves(classes: Sequence[int], ranks: Ranks, idle: Sequence[int]) -> Iterator[Ranks]:
    """Yields each change of one rank's stage, and of an idle one to a stage; one of each class is enough."""
    for t in range(len(ranks)):
        for rank in {classes[rank]: rank for rank in idle}.values():
            yield _add(ranks, t, rank)
    for s, stage in enumerate(ranks):
        for rank in {classes[rank]: rank for rank in stage}.values() if len(stage) > 1 else ():
            without = tuple(tuple(r for r in each if r != rank) for each in ranks)
            yield without
            yield from (_add(without, t, rank) for t in range(len(ranks)) if t != s)


def _put(ranks: Ranks, stage: int, replica: int, rank: int) -> Ranks:
    changed = (*ranks[stage][:replica], rank, *ranks[stage][replica + 1 :])
    return (*ranks[:stage], changed, *ranks[stage + 1 :])


def _add(ranks: Ranks, stage: int, rank: int) -> Ranks:
    return (*ranks[:stage], (*ranks[stage], rank), *ranks[stage + 1 :])
