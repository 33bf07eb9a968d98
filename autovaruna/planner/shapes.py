"""Lists the shapes that a search begins from (grids, unequal replicas, several stages a rank), and cuts for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.arrays import Array
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.problem import FEW_RANKS, Problem, forced_stages, micro_batch_range
from autovaruna.planner.search_space import Ranks, in_a_row, layouts, micro_batch_counts, rank_orders, stage_limit
from autovaruna.schedule.pipeline import share_of

Pattern = tuple[int, ...]
"""The group of ranks of each stage."""
_MOST_GRIDS = 24
"""Up to so many stages every number of them is tried; of more, some that are evenly spaced in ratio."""
_MOST_PLANS = 2**15
"""If ranks and segments are split over stages in no more ways than these, for all orders and M, each is tried."""
CELLS = 10**7
"""Of the tables in which the formula finds cuts: with more it is used where it has to be."""
_EVERY = 4
"""Up to so many rounds every number is tried, there and back too; in so many groups some may have a stage more."""
_FEW = 6
"""So many stages may come in every order (31 at most); if there are no more ways to cut the segments, each is tried."""
_ROWS = 32
"""Of a table of costs, which are read together."""
_HALVINGS = 20
"""After so many halvings the work of even stages is known to a millionth."""


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
    work = float(sized.step_seconds.sum())
    part = max(work / grid.num_stages, float(sized.step_seconds.max()))
    share = share_of(grid.num_micro_batches, grid.num_replicas, 0)
    return (share * part + work - part) / max(planner.problem.cluster.speeds)


def groups_of(planner: Planner) -> Iterator[tuple[float, Ranks, int]]:
    """Yields about the seconds, groups of equally many ranks, and M.

    Of tiny problems they come in every order, with every M, and of few ranks in unequal groups, too.
    """
    problem = planner.problem
    num_ranks, forced = problem.cluster.num_ranks, problem.constraints.num_replicas
    counts = micro_batch_counts(problem) if planner.is_tiny else even_counts(problem)
    orders = rank_orders(problem) if planner.is_tiny else rank_orders(problem)[:1]
    unequal = list(_splits(num_ranks)) if planner.is_tiny and not forced and num_ranks <= 4 else []
    for order, count in product(orders, counts):
        even = [(min(forced or num_ranks // number, count),) * number for number in range(2, num_ranks + 1)]
        for replicas in dict.fromkeys([*even, *unequal]):
            if len(replicas) > 1 and sum(replicas) <= num_ranks and max(replicas) <= count:
                work = count * float(planner.sized(count).step_seconds.sum()) / max(problem.cluster.speeds)
                yield work / sum(replicas), in_a_row(problem, order, replicas), count


def cut_grids(
    planner: Planner, grids: Sequence[Grid], is_open: Callable[[Grid], bool]
) -> Iterator[tuple[Grid, list[Candidate]]]:
    """Yields grids that are open, the best first, in several orders and layouts of ranks: with even cuts, and others.

    These are by the formula, for the first layout of an order; where that takes long, even cuts are enough if they fit.
    """
    for grid in sorted(grids, key=lambda grid: even_seconds(planner, grid)):
        num_stages, replicas, count = grid
        if num_stages < _fewest_stages(planner, count) or not is_open(grid):
            continue
        even = even_starts(planner.tables.prefix(planner.sized(count).step_seconds), num_stages)
        found = list[Candidate]()
        is_quick = num_stages * planner.tables.num_segments**2 <= CELLS
        for order in rank_orders(planner.problem):
            places = layouts(planner.problem, order, [replicas] * num_stages)
            is_enough = not is_quick and planner.build(Candidate(even, places[0], count))
            suited = None if is_enough else cut_for_ranks(planner, count, places[0])
            for starts in (even, suited.starts) if suited else (even,):
                found += [Candidate(starts, ranks, count) for ranks in places]
        yield grid, list(dict.fromkeys(found))


def _fewest_stages(planner: Planner, count: int) -> float:
    sized = planner.sized(count)
    state = sized.model.fixed(sized.held_by(0, planner.tables.num_segments))
    return state / max(planner.problem.cluster.memory_bytes)


def unequal_replicas(planner: Planner, count: int, below: float) -> Iterator[Candidate]:
    """Yields the best split of each number of stages and ranks, by the formula, for M micro-batches, or of few all.

    Of many ranks, replicas are multiples of a part of them. Splits that take `below` by the formula are left out.
    """
    problem, num_ranks = planner.problem, planner.problem.cluster.num_ranks
    forced, unit = forced_stages(problem), math.ceil(num_ranks / FEW_RANKS)
    choices = sorted({min(choice, count) for choice in range(unit, num_ranks + 1, unit)})
    most = min(stage_limit(problem, planner.tables.num_segments), num_ranks // choices[0])
    if most < _fewest_stages(planner, count):
        return
    orders = rank_orders(problem)
    segments = planner.tables.num_segments
    if 2 ** (num_ranks + segments) * len(orders) * len(micro_batch_counts(problem)) <= _MOST_PLANS:
        for order, replicas in product(orders, _splits(num_ranks)):
            if forced in (0, len(replicas)) and len(replicas) <= most and max(replicas) <= count:
                ranks = in_a_row(problem, order, replicas)
                for inner in combinations(range(1, segments), len(replicas) - 1):
                    yield Candidate((0, *inner), ranks, count)
        return
    for order in orders:
        for seconds, starts, replicas in _best_splits(planner, count, order, choices, most):
            if seconds < below and forced in (0, len(starts)):
                for ranks in layouts(problem, order, replicas):
                    yield Candidate(starts, ranks, count)


def _best_splits(
    planner: Planner, count: int, order: Sequence[int], choices: Sequence[int], most: int
) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Returns seconds, starts and replicas of the best split for each number of stages and of ranks, by the formula.

    A dynamic program puts stages before others; the last one has the last ranks of the order.
    """
    formula, n, speeds = planner.formula(count), planner.tables.num_segments, planner.problem.cluster.speeds
    end = np.where(np.arange(n + 1) == n, 0.0, np.inf)
    best = {(0, 0): end}  # by ranks and stages, for each first segment
    steps: dict[tuple[int, int], tuple[Array, Array]] = {}  # of the first of these stages: its replicas, and its end
    for used, replicas in product(range(1, len(order) + 1), choices):
        rest = [stages for stages in range(most) if (used - replicas, stages) in best]
        if rest:
            first, behind = len(order) - used, len(order) - used + replicas
            ranks = sorted(order[first:behind], key=lambda rank: -speeds[rank])
            costs = formula.seconds(ranks, used, order[first - 1 : first], order[behind : behind + 1])
        for stages in rest:
            values, ends = put_before(costs, best[used - replicas, stages])
            row = best.setdefault((used, stages + 1), np.full(n + 1, np.inf))
            counts, stops = steps.setdefault((used, stages + 1), (np.zeros(n + 1), np.zeros(n + 1)))
            better = values < row
            row[better], counts[better], stops[better] = values[better], replicas, ends[better]
    found = []
    for (used, stages), row in best.items():
        if stages and np.isfinite(row[0]):
            starts, replicas_of = [0], list[int]()
            for left in range(stages, 0, -1):
                counts, stops = steps[used, left]
                replicas_of.append(int(counts[starts[-1]]))
                used -= replicas_of[-1]
                starts.append(int(stops[starts[-1]]))
            found.append((float(row[0]), tuple(starts[:-1]), tuple(replicas_of)))
    return sorted(found, key=lambda each: (each[0], sum(each[2])))


def _splits(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields all numbers of replicas of stages that use so many ranks, or fewer."""
    for used in range(1, num_ranks + 1):
        for inner in (inner for number in range(used) for inner in combinations(range(1, used), number)):
            yield tuple(behind - first for first, behind in pairwise((0, *inner, used)))


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


def cut_for_ranks(planner: Planner, count: int, stage_ranks: Ranks) -> Candidate | None:
    """Returns the best cuts for some ranks by the formula, or, if none fits by it, those of the least work."""
    formula, costs = planner.formula(count), list[Array]()
    for stage, ranks in enumerate(stage_ranks):
        num_held = max(sum(rank in others for others in stage_ranks) for rank in ranks)
        num_behind = sum(map(len, stage_ranks[stage:]))
        before = stage_ranks[stage - 1][-1:] if stage else ()
        behind = stage_ranks[stage + 1][:1] if stage + 1 < len(stage_ranks) else ()
        costs.append(formula.seconds(ranks, num_behind, before, behind, num_held))
    split = partition_chain(costs) or partition_chain([planner.sized(count).work] * len(costs))
    return Candidate(split.starts, stage_ranks, count) if split else None


@dataclass(frozen=True, slots=True)
class ChainPartition:
    """A split of n segments; stage s has the segments ``starts[s] .. starts[s + 1] - 1`` (the last one: to the end)."""

    starts: tuple[int, ...]
    objective: float


def partition_chain(stage_costs: Sequence[Array]) -> ChainPartition | None:
    """Returns the split into stages whose greatest cost is least, or None if there is none.

    Each stage has a matrix of its costs, ``(n + 1, n + 1)``, infinite for what is not allowed.
    """
    n = stage_costs[0].shape[0] - 1
    best = np.full(n + 1, np.inf)
    best[n] = 0.0
    choices = []
    for costs in reversed(stage_costs):
        best, choice = put_before(costs, best)
        choices.append(choice)
    if not np.isfinite(best[0]):
        return None
    starts = [0]
    for choice in choices[:0:-1]:
        starts.append(int(choice[starts[-1]]))
    return ChainPartition(tuple(starts), float(best[0]))


def put_before(costs: Array, best: Array) -> tuple[Array, NDArray[np.int64]]:
    """Puts one more stage before the best splits; returns the greatest cost for each start, and its end."""
    n = len(best) - 1
    values, ends = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
    # Few rows at a time stay in the processor's cache, and need only the columns after the first of them.
    for row in range(0, n, _ROWS):
        rows = min(_ROWS, n - row)
        totals = np.maximum(costs[row : row + rows, row + 1 :], best[row + 1 :])
        totals[np.tril_indices(rows, -1, n - row)] = np.inf
        choice = totals.argmin(axis=1)
        ends[row : row + rows] = choice + row + 1
        values[row : row + rows] = totals[np.arange(rows), choice]
    return values, ends


def even_starts(work: Array, num_stages: int) -> tuple[int, ...]:
    """Returns where stages start whose greatest work is least; `work` is that of all segments before each place."""
    low, high, best = work[-1] / num_stages, float(work[-1]), list(range(num_stages))
    for _ in range(_HALVINGS):
        middle, starts = (low + high) / 2, [0]
        for behind in range(num_stages - 1, 0, -1):
            end = int(work.searchsorted(work[starts[-1]] + middle, side="right")) - 1
            starts.append(min(max(end, starts[-1] + 1), len(work) - 1 - behind))
        if work[-1] - work[starts[-1]] <= middle and np.diff(work[starts]).max(initial=0.0) <= middle:
            high, best = middle, starts
        else:
            low = middle
    return tuple(best)
