"""Searches plans in which ranks hold several stages each, in rounds or there and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.cuts import even_starts
from autovaruna.planner.grids import cut_for_ranks
from autovaruna.planner.placement import Ranks
from autovaruna.planner.problem import FEW_RANKS, forced_stages
from autovaruna.schedule.pipeline import share_of

Pattern = tuple[int, ...]

_EVERY = 4
"""Up to so many rounds every number is tried, there and back too; in so many groups some may have a stage more."""
_FEW = 6
"""So many stages may come in every order (31 at most); if there are no more ways to cut the segments, each is tried."""


def patterns(num_groups: int, most_each: int, num_stages: int = 0, *, has_any_order: bool = False) -> Iterator[Pattern]:
    """Yields patterns over K groups with at most so many stages each, neighbours on different ones.

    Args:
        num_stages: the only number of stages; 0: any.
        has_any_order: whether every order of few stages comes, not only turns and ways there and back.
    """
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
    if has_any_order:
        found = _in_any_order(num_groups, most_each, (0,))
        yield from (each for each in found if num_stages in (0, len(each)))


def _in_any_order(num_groups: int, most_each: int, begun: Pattern) -> Iterator[Pattern]:
    """Yields every pattern of few stages that goes on from one and comes to the groups in their order."""
    num_seen = max(begun) + 1
    if num_seen == num_groups < len(begun):
        yield begun
    for group in range(min(num_seen + 1, num_groups)) if len(begun) < _FEW else ():
        if group != begun[-1] and begun.count(group) < most_each:
            yield from _in_any_order(num_groups, most_each, (*begun, group))


class Shape(NamedTuple):
    """Groups of ranks, the group of each stage, and M; `seconds` is about what a step takes, if all goes well."""

    seconds: float
    groups: Ranks
    pattern: Pattern
    num_micro_batches: int


def shapes_on(planner: Planner, most_each: int, known: Iterable[tuple[float, Ranks, int]]) -> list[Shape]:
    """Returns shapes on groups of ranks, given with the seconds of one stage on each, and M; the best first."""
    problem, found = planner.problem, list[Shape]()
    fastest, forced = max(problem.cluster.speeds), forced_stages(problem)
    for seconds, groups, count in known:
        sized, num_groups = planner.sized(count), len(groups)
        fill = float(sized.step_seconds.sum()) * (1 - 1 / num_groups) / fastest
        more = sized.overhead_seconds * share_of(count, len(groups[0]), 0)
        every = patterns(num_groups, most_each, forced, has_any_order=planner.is_tiny) if num_groups > 1 else ()
        for pattern in dict.fromkeys(every):
            each = len(pattern) / num_groups
            if len(pattern) <= planner.tables.num_segments:
                found.append(Shape(seconds - fill * (1 - 1 / each) + more * (each - 1), groups, pattern, count))
    return varied(found)


def varied(shapes: Iterable[Shape]) -> list[Shape]:
    """Returns the best shape of each number of groups and of stages, then the next best of each, and so on."""
    turns, keyed = Counter[tuple[int, int]](), []
    for shape in sorted(shapes, key=lambda shape: shape.seconds):
        kind = len(shape.groups), len(shape.pattern)
        keyed.append((turns[kind], shape))
        turns[kind] += 1
    return [shape for _, shape in sorted(keyed, key=lambda each: (each[0], each[1].seconds))]


def candidates_of(planner: Planner, shape: Shape) -> Iterator[Candidate]:
    """Yields a shape with even cuts, with some that suit the memory of few ranks, or of few cuts with all."""
    count, segments = shape.num_micro_batches, planner.tables.num_segments
    ranks = tuple(shape.groups[group] for group in shape.pattern)
    yield Candidate(even_starts(planner.tables.prefix(planner.sized(count).step_seconds), len(ranks)), ranks, count)
    if planner.problem.cluster.num_ranks <= FEW_RANKS:
        suited = cut_for_ranks(planner, count, ranks)
        if suited:
            yield suited
    if math.comb(segments - 1, len(ranks) - 1) <= _FEW:
        for inner in combinations(range(1, segments), len(ranks) - 1):
            yield Candidate((0, *inner), ranks, count)
