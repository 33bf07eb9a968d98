"""Yields candidates with several stages a rank: in turn over groups of ranks, or there and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from autovaruna.planner.bound import bound_of_all
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import NEAR, NEAR_OF_A_FORMULA, Evaluator, Trial
from autovaruna.planner.one_a_rank import even_counts
from autovaruna.planner.partition import cut_for_ranks, even_starts
from autovaruna.planner.problem import FEW_RANKS, forced_stages
from autovaruna.planner.search_space import Ranks, in_a_row, micro_batch_counts, rank_orders, stages_per_rank
from autovaruna.schedule.pipeline import share_of

Pattern = tuple[int, ...]
"""The group of ranks of each stage."""
Groups = tuple[float, Ranks, int]
"""About the seconds of a step with one stage on each group of ranks, the groups, and M."""
WORTH = 0.995
"""A plan with several stages a rank has to take less than this share of the best seconds with one."""
_MOST_SHAPES = 400
"""Of which a bound is taken."""
_EVERY = 4
"""Up to so many rounds every number is tried, there and back too; in so many groups some may have a stage more."""
_MOST_GROUPS = 200
"""Groups of ranks, those of the fastest plans, that several stages a rank are tried on."""


class Shape(NamedTuple):
    """Groups of ranks, the group of each stage, and M; `seconds` is about what a step takes, if all goes well."""

    seconds: float
    groups: Ranks
    pattern: Pattern
    num_micro_batches: int


def several_a_rank(evaluator: Evaluator) -> Iterator[Trial]:
    """Yields several stages a rank on the groups of the best plans, if one may be better, the least bounds first."""
    planner = evaluator.planner
    plans = evaluator.best_of_each(lambda each: (each.ranks, each.num_micro_batches), math.inf)[:_MOST_GROUPS]
    known: Iterable[Groups] = ((evaluator.seconds_of(each), each.ranks, each.num_micro_batches) for each in plans)
    if forced_stages(planner.problem):
        known = even_groups(planner)
    shapes = shapes_on(planner, known, lambda num_groups: patterns(planner, num_groups)) if is_open(evaluator) else []
    for shape in sorted(shape._replace(seconds=_bound(planner, shape)) for shape in shapes[:_MOST_SHAPES]):
        if shape.seconds >= evaluator.least_seconds * NEAR_OF_A_FORMULA:  # other cuts may have a lesser bound
            break
        for candidate in cuts_of(planner, shape):
            yield candidate, evaluator.least_seconds * NEAR


def is_open(evaluator: Evaluator) -> bool:
    """Returns whether ranks may have several stages, and a plan with such ranks may be better than the best without."""
    planner, counts = evaluator.planner, micro_batch_counts(evaluator.planner.problem)
    if stages_per_rank(planner.problem) == 1:
        return False
    return min(bound_of_all(planner.sized(count)) for count in counts) < evaluator.least_seconds * WORTH


def even_groups(planner: Planner) -> Iterator[Groups]:
    """Yields groups of equally many ranks in their order, for some M."""
    problem = planner.problem
    num_ranks, forced = problem.cluster.num_ranks, problem.constraints.num_replicas
    for count in even_counts(problem):
        for number in range(2, num_ranks + 1):
            replicas = (min(forced or num_ranks // number, count),) * number
            if sum(replicas) <= num_ranks:
                yield on_groups(planner, rank_orders(problem)[0], replicas, count)


def on_groups(planner: Planner, order: Sequence[int], replicas: Sequence[int], count: int) -> Groups:
    """Returns groups of so many ranks, next to each other in an order, and about what a step on them takes."""
    work = count * float(planner.sized(count).step_seconds.sum()) / max(planner.problem.cluster.speeds)
    return work / sum(replicas), in_a_row(planner.problem, order, replicas), count


def shapes_on(
    planner: Planner, known: Iterable[Groups], patterns_of: Callable[[int], Iterable[Pattern]]
) -> list[Shape]:
    """Returns shapes on groups of ranks, in some patterns over so many of them; the best first."""
    fastest, found = max(planner.problem.cluster.speeds), list[Shape]()
    for seconds, groups, count in known:
        sized, num_groups = planner.sized(count), len(groups)
        fill = float(sized.step_seconds.sum()) * (1 - 1 / num_groups) / fastest
        more = sized.overhead_seconds * share_of(count, len(groups[0]), 0)
        for pattern in dict.fromkeys(patterns_of(num_groups) if num_groups > 1 else ()):
            each = len(pattern) / num_groups
            if len(pattern) <= planner.tables.num_segments:
                found.append(Shape(seconds - fill * (1 - 1 / each) + more * (each - 1), groups, pattern, count))
    return sorted(found)


def patterns(planner: Planner, num_groups: int) -> Iterator[Pattern]:
    """Yields patterns over K groups, neighbours on different ones: in turn, or there and back."""
    most_each, num_stages = stages_per_rank(planner.problem), forced_stages(planner.problem)
    rounds = [each for each in range(2, most_each + 1) if each <= _EVERY or each in (most_each, each // 2 * 2)]
    in_turn = {num_groups * each for each in rounds} | {num_groups + 1}
    in_turn |= set(range(num_groups + 1, 2 * num_groups)) if num_groups <= _EVERY else set()
    for length in [num_stages] if num_stages else sorted(in_turn):
        if num_groups < length <= num_groups * most_each:
            yield tuple(stage % num_groups for stage in range(length))
    for each in range(2, (most_each if num_stages else _EVERY) + 1) if num_groups > 2 else ():
        there = [*range(num_groups), *range(num_groups - 2, 0, -1)]
        for length in (each * (num_groups - 1) + 1, each * (num_groups - 1)):  # the whole way, or without its end
            if num_stages in (0, length) and each <= most_each:
                yield tuple(there[stage % len(there)] for stage in range(length))


def cuts_of(planner: Planner, shape: Shape) -> Iterator[Candidate]:
    """Yields a shape with even cuts, and with some that suit the memory of few ranks."""
    count, ranks = shape.num_micro_batches, tuple(shape.groups[group] for group in shape.pattern)
    yield Candidate(even_starts(planner.tables.prefix(planner.sized(count).step_seconds), len(ranks)), ranks, count)
    if planner.problem.cluster.num_ranks <= FEW_RANKS:
        suited = cut_for_ranks(planner, count, ranks)
        if suited:
            yield suited


def _bound(planner: Planner, shape: Shape) -> float:
    """Returns what no schedule of even cuts beats, which says more than a formula; with all memory where none fits."""
    planner.count_candidate()
    even = next(cuts_of(planner, shape))
    plan = planner.build(even) or planner.build(even, (math.inf,) * planner.problem.cluster.num_ranks)
    return planner.bound(plan) if plan else math.inf
