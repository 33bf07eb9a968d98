"""Tries nearly all plans of a tiny problem, where a formula says little: any order of groups, every cut and variant."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import NEAR, Evaluator, Trial
from autovaruna.planner.problem import forced_stages
from autovaruna.planner.search_space import in_a_row, micro_batch_counts, rank_orders, stage_limit, stages_per_rank
from autovaruna.planner.several_a_rank import (
    Groups,
    Pattern,
    cuts_of,
    is_open,
    on_groups,
    patterns,
    shapes_on,
)

_TINY = 100
"""Ranks times segments of a problem in which this is done."""
_MOST_PLANS = 2**15
"""If ranks and segments are split over stages in no more ways than these, for all orders and M, each is tried."""
_FEW_RANKS = 4
"""Up to so many come in unequal groups, too."""
_FEW = 6
"""So many stages may come in every order (31 at most); if there are no more ways to cut the segments, each is tried."""
_MOST_SHAPES = 1500
"""With several stages a rank, of which bounds are taken."""
NEAR_TO_BEGIN = 1.25
"""Moves begin from plans that take no more than so many times the least seconds."""


def is_tiny(planner: Planner) -> bool:
    """Returns whether ranks and segments are so few."""
    return planner.problem.cluster.num_ranks * planner.tables.num_segments <= _TINY


def every_place(candidate: Candidate) -> Hashable:
    """Returns what moves begin from once: each place."""
    return candidate.opened()


def every_split(evaluator: Evaluator) -> Iterator[Trial]:
    """Yields all cuts and replicas in all orders of ranks, for all M, if they are few, the least bounds first."""
    problem, segments = evaluator.planner.problem, evaluator.planner.tables.num_segments
    num_ranks, most, forced = problem.cluster.num_ranks, stage_limit(problem, segments), forced_stages(problem)
    orders, counts = rank_orders(problem), micro_batch_counts(problem)
    is_few = 2 ** (num_ranks + segments) * len(orders) * len(counts) <= _MOST_PLANS
    splits = list(_splits(num_ranks)) if is_few and not problem.constraints.num_replicas else []
    return _by_bound(
        evaluator,
        (
            Candidate((0, *inner), in_a_row(problem, order, replicas), count)
            for count, order, replicas in product(counts, orders, splits)
            if forced in (0, len(replicas)) and len(replicas) <= most and max(replicas) <= count
            for inner in combinations(range(1, segments), len(replicas) - 1)
        ),
    )


def every_order(evaluator: Evaluator) -> Iterator[Trial]:
    """Yields several stages a rank on groups in any order, with all cuts if these are few, the least bounds first."""
    planner, segments = evaluator.planner, evaluator.planner.tables.num_segments
    shapes = shapes_on(planner, _every_group(planner), lambda count: _patterns(planner, count))
    found = list[Candidate]()
    for shape in shapes[:_MOST_SHAPES] if is_open(evaluator) else ():
        found += cuts_of(planner, shape)
        if math.comb(segments - 1, len(shape.pattern) - 1) <= _FEW:
            inner = combinations(range(1, segments), len(shape.pattern) - 1)
            found += [replace(found[-1], starts=(0, *each)) for each in inner]
    return _by_bound(evaluator, found)


def _by_bound(evaluator: Evaluator, candidates: Iterable[Candidate]) -> Iterator[Trial]:
    """Yields candidates, with all memory those first that no schedule makes slow."""
    planner, found = evaluator.planner, dict[Candidate, float]()
    for candidate in candidates:
        plan = planner.build(candidate, (math.inf,) * planner.problem.cluster.num_ranks)
        found[candidate] = planner.bound(plan) if plan else math.inf
    for candidate, bound in sorted(found.items(), key=lambda each: each[1]):
        if bound >= evaluator.least_seconds * NEAR:
            break
        yield candidate, evaluator.least_seconds * NEAR


def _every_group(planner: Planner) -> Iterator[Groups]:
    """Yields groups of equally many ranks, and of few ranks unequal ones, in every order, for every M."""
    problem = planner.problem
    num_ranks, forced = problem.cluster.num_ranks, problem.constraints.num_replicas
    unequal = list(_splits(num_ranks)) if not forced and num_ranks <= _FEW_RANKS else []
    for order, count in product(rank_orders(problem), micro_batch_counts(problem)):
        even = [(min(forced or num_ranks // number, count),) * number for number in range(2, num_ranks + 1)]
        for replicas in dict.fromkeys([*even, *unequal]):
            if len(replicas) > 1 and sum(replicas) <= num_ranks and max(replicas) <= count:
                yield on_groups(planner, order, replicas, count)


def _splits(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields all numbers of replicas of stages that use so many ranks, or fewer."""
    for used in range(1, num_ranks + 1):
        for inner in (inner for number in range(used) for inner in combinations(range(1, used), number)):
            yield tuple(behind - first for first, behind in pairwise((0, *inner, used)))


def _patterns(planner: Planner, num_groups: int) -> Iterator[Pattern]:
    """Yields patterns over K groups: those of all problems, then every order of few stages."""
    forced = forced_stages(planner.problem)
    yield from patterns(planner, num_groups)
    found = _in_any_order(num_groups, stages_per_rank(planner.problem), (0,))
    yield from (each for each in found if forced in (0, len(each)))


def _in_any_order(num_groups: int, most_each: int, begun: Pattern) -> Iterator[Pattern]:
    """Yields every pattern of few stages that goes on from one and comes to the groups in their order."""
    num_seen = max(begun) + 1
    if num_seen == num_groups < len(begun):
        yield begun
    for group in range(min(num_seen + 1, num_groups)) if len(begun) < _FEW else ():
        if group != begun[-1] and begun.count(group) < most_each:
            yield from _in_any_order(num_groups, most_each, (*begun, group))
