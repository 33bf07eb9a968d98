"""Lists what a search tries: places to cut, numbers of micro-batches and stages, depths and schedules, orders of ranks.

Finds the blocks that names of cuts mean, and plans with the user's cut points: only there, or there if as good.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate, combinations, permutations, product
from math import factorial, prod

import numpy as np

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner.candidate import DEEPEST
from autovaruna.planner.prediction import policy_of
from autovaruna.planner.problem import (
    FEW_RANKS,
    Problem,
    forced_stages,
    micro_batch_range,
    most_stages_per_rank,
)
from autovaruna.planner.records import Plan
from autovaruna.profiler.records import Cluster

_log = logging.getLogger(__name__)

Ranks = tuple[tuple[int, ...], ...]
"""The ordered ranks of each stage."""
PREFER_MARGIN = 0.05
"""By which share of its step a plan that cuts elsewhere must be better than one that cuts at cut points."""
MAX_SEGMENTS, MAX_SEGMENTS_OF_MANY_RANKS = 400, 1000
"""Places to cut: tables over ranges have the square of this many entries; 96 stages of 400 are not even enough."""
_MAX_COUNTS = 32
"""Of up to so many numbers of micro-batches all are tried."""
_INTERLEAVED = ("interleaved", "deepest_first", "1f1b", "varuna")
"""Schedules of ranks with several stages, the two made for them first."""
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


def zoomed_positions(problem: Problem, cuts: Sequence[int], num_segments: int) -> list[int]:
    """Returns every block near the given cuts (first blocks of stages), as positions."""
    n = len(problem.graph.blocks)
    reach = min(max(2, 2 * n // num_segments), MAX_SEGMENTS // max(len(cuts), 1) // 2 + 1)
    near = {block for cut in cuts[1:] for block in range(cut - reach, cut + reach + 1)}
    return sorted({0, n, *cuts} | {block for block in near if 0 < block < n})


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


def nearby_counts(problem: Problem, count: int) -> list[int]:
    """Returns numbers of micro-batches close to one that was found good."""
    low, high = micro_batch_range(problem)
    near = {count + change for change in (-2, -1, 1, 2)} | {math.ceil(count / 2), count * 2}
    step = problem.cluster.num_ranks
    near |= {count // step * step, count // step * step + step}
    return sorted(other for other in near if low <= other <= high and other != count)


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


def resolve_cut(graph: Graph, name: str) -> int:
    """Returns the index of the block at which a cut starts a new stage; the name may be that of a cut point.

    Raises:
        PlanError: if no block and no module has that name; names the nearest.
    """
    of_blocks = [block.index for block in graph.blocks if block.name == name]
    of_marks = [mark.block for mark in graph.cut_marks if mark.name == name and mark.block > 0]
    of_modules = [block.index for block in graph.blocks if f"{block.module}.".startswith(f"{name}.")]
    if found := [*of_blocks, *of_marks, *of_modules]:
        return found[0]
    paths = [accumulate(block.module.split("."), "{}.{}".format) for block in graph.blocks if block.module]
    modules = {module for path in paths for module in path}
    names = [block.name for block in graph.blocks]
    nearest = get_close_matches(name, [*sorted(modules), *names], n=3, cutoff=0.4)
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else f"; the blocks start with {', '.join(names[:5])}"
    raise PlanError(f"cut {name!r} names no block and no module of this model{hint}")


def resolve_cuts(graph: Graph, names: Sequence[str]) -> tuple[int, ...]:
    """Returns the first block of each stage but the first.

    Raises:
        PlanError: if a name is unknown, or the cuts are not in execution order, or one leaves a stage empty.
    """
    starts = tuple(resolve_cut(graph, name) for name in names)
    before, before_name = 0, "the start of the model"
    for start, name in zip(starts, names, strict=True):
        if start <= before:
            raise PlanError(
                f"cut {name!r} (block {start}) does not lie after {before_name!r} (block {before}): the stage between "
                f"them would be empty; give the cuts in execution order"
            )
        before, before_name = start, name
    return starts


def stage_blocks(starts: Sequence[int], num_blocks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the blocks of each stage, given the first block of each (the first one is 0)."""
    ends = [*starts[1:], num_blocks]
    return tuple(tuple(range(i, j)) for i, j in zip(starts, ends, strict=True))


def plan_with_cut_points(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Returns the best plan that heeds the cut points as the user asked; raises PlanError if there is none."""
    choice = problem.constraints.cutpoints
    if choice == "ignore" or problem.constraints.cuts or (choice == "prefer" and not problem.graph.cut_marks):
        return search(problem)
    for mark in problem.graph.cut_marks:
        if mark.block <= 0:
            _log.warning("the CutPoint %s cannot be a cut: %s", mark.name, mark.reason)
    free, marked = (
        replace(problem, constraints=replace(problem.constraints, cutpoints=each)) for each in ("ignore", "only")
    )
    if choice == "only":
        return _search_marked(marked, search)
    try:
        plan = _search_marked(marked, search)
    except PlanError as error:
        _log.info("no plan cuts at cut points alone (%s); cutting anywhere", error)
        return search(free)
    other = search(free)
    if other.predicted_seconds < plan.predicted_seconds * (1.0 - PREFER_MARGIN):
        seconds = other.predicted_seconds, plan.predicted_seconds
        _log.info("cutting beside the cut points: a step takes %.6g s, at the cut points %.6g s", *seconds)
        return other
    return replace(
        plan,
        bound_seconds=min(plan.bound_seconds, other.bound_seconds),
        single_bound_seconds=other.single_bound_seconds,
        bound_proof=other.bound_proof,
    )


def _search_marked(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Returns the plan that cuts at cut points alone; raises PlanError if there are too few of them."""
    graph, constraints = problem.graph, problem.constraints
    num_stages, most = constraints.num_stages or len(constraints.stage_ranks), len(cut_point_blocks(graph)) + 1
    if num_stages <= most:
        return search(problem)
    useless = "".join(f"; {mark.name} is none: {mark.reason}" for mark in graph.cut_marks if mark.block <= 0)
    raise PlanError(
        f"{num_stages} stages are asked for, but cutpoints='only' allows {most}: the model has {most - 1} places with "
        f"a usable CutPoint{useless}. Put CutPoints between the stages that you want, ask for {most} stages or fewer, "
        "or pass cutpoints='prefer'"
    )


def cut_point_blocks(graph: Graph) -> list[int]:
    """Returns the blocks at which a cut point lets a stage start, ascending."""
    return sorted({mark.block for mark in graph.cut_marks if mark.block > 0})
