"""Improves plans by moves that shorten the simulated step: cuts, micro-batches, ranks, and what each stage holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import combinations, permutations, product

from autovaruna.planner.candidate import Candidate
from autovaruna.planner.evaluator import Evaluator, Trial
from autovaruna.planner.partition import cut_for_ranks
from autovaruna.planner.problem import FEW_RANKS, Problem, micro_batch_range
from autovaruna.planner.rank_memory import choices_of, peak_of
from autovaruna.planner.search_space import Ranks, classes_of, spread, stages_per_rank, variants

_MOST_STARTS = 24
"""Moves begin from so many plans, at most."""
BETTER = 0.9995
"""What a move has to save: a plan that is hardly faster is not worth the next simulations."""
_NEARLY = 1.05
"""What takes no longer than so many times the seconds is kept, to begin from it later."""
_STEPS = (64, 32, 16, 8, 4, 2, 1)
"""Segments that a cut is moved by: the farthest first, since what crosses may be much less at a place far away."""
_RATIO = 1.5
"""Of many depths, each that is tried is greater than the one before by this."""
Move = Callable[[Evaluator, Candidate], Iterator[Candidate]]
"""Yields candidates that differ little from one."""


def climbs(evaluator: Evaluator, kind: Callable[[Candidate], Hashable], near: float) -> Iterator[Iterator[Trial]]:
    """Yields moves from the best plan of each kind that takes no more than `near` times the least, the fastest first.

    Moves end where they come to a kind from which others have begun: no more is tried from there.
    """
    begun = set[Hashable]()
    for _ in range(_MOST_STARTS):
        starts = (each for each in evaluator.best_of_each(kind, near) if kind(each) not in begun)
        if (start := next(starts, None)) is None:
            return
        yield _climb(evaluator, start, lambda other: kind(other) not in begun)
        begun.add(kind(start))


def _climb(evaluator: Evaluator, start: Candidate, is_new: Callable[[Candidate], bool]) -> Iterator[Trial]:
    """Yields changes of a candidate, then of what is better, until none is.

    Each kind of move is tried when those before it are of no use; after a success they begin anew.
    """
    seconds, kind = evaluator.seconds_of(start), 0
    while kind < len(MOVES):
        for other in filter(is_new, MOVES[kind](evaluator, start)):
            yield other, seconds * (BETTER if other.choices else _NEARLY)
            if evaluator.seconds_of(other) < seconds * BETTER:
                yield from [(other.opened(), evaluator.seconds_of(other))] if other.is_fixed else []
                found = [evaluator.found(each) for each in (other, other.opened())]
                start = min((each for each in found if each), key=evaluator.seconds_of)
                seconds, kind = evaluator.seconds_of(start), 0
                break
        else:
            kind += 1


def _move_cuts(evaluator: Evaluator, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with one cut moved, by ever fewer segments."""
    starts, bounds = start.starts, [*start.starts, evaluator.planner.tables.num_segments]
    for step, s in product(_STEPS, range(1, len(starts))):
        for moved in (starts[s] - step, starts[s] + step):
            if bounds[s - 1] < moved < bounds[s + 1]:
                yield replace(start, starts=(*starts[:s], moved, *starts[s + 1 :]))


def _move_groups(evaluator: Evaluator, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with one stage on the ranks of others, where ranks hold several."""
    most = stages_per_rank(evaluator.planner.problem)
    for stage, other in product(range(len(start.ranks)), dict.fromkeys(start.ranks)) if start.is_interleaved else ():
        near = start.ranks[max(stage - 1, 0) : stage + 2]
        if other not in near and start.ranks.count(start.ranks[stage]) > 1 and start.ranks.count(other) < most:
            yield _without_choices(replace(start, ranks=(*start.ranks[:stage], other, *start.ranks[stage + 1 :])))


def _move_counts(evaluator: Evaluator, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with other numbers of micro-batches, close to that which was found good."""
    problem, count = evaluator.planner.problem, start.num_micro_batches
    (low, high), step = micro_batch_range(problem), problem.cluster.num_ranks
    near = {count + change for change in (-2, -1, 1, 2)} | {math.ceil(count / 2), count * 2}
    for other in sorted(near | {count // step * step, count // step * step + step}):
        if low <= other <= high and other != count:
            yield _without_choices(replace(start, num_micro_batches=other))


def _move_ranks(evaluator: Evaluator, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with ranks in other places, with the same cuts and with those that suit them."""
    planner, groups = evaluator.planner, tuple(dict.fromkeys(start.ranks))
    pattern = [groups.index(ranks) for ranks in start.ranks]
    for changed in _changed_ranks(planner.problem, groups):
        moved = _without_choices(replace(start, ranks=tuple(changed[group] for group in pattern)))
        yield moved
        if planner.problem.cluster.num_ranks <= FEW_RANKS:
            suited = cut_for_ranks(planner, start.num_micro_batches, moved.ranks)
            if suited:
                yield replace(moved, starts=suited.starts)


def _without_choices(candidate: Candidate) -> Candidate:
    return candidate.opened() if candidate.choices else candidate


def _changed_ranks(problem: Problem, ranks: Ranks) -> Iterator[Ranks]:
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


def _move_choices(evaluator: Evaluator, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates that say what their stages hold, with other choices of one stage, or another schedule."""
    constraints, plan = evaluator.planner.problem.constraints, evaluator.plans[start]
    start = replace(start.opened(), schedule=plan.schedule, choices=choices_of(plan.stages))
    chosen, shares = start.choices, [-(-start.num_micro_batches // len(ranks)) for ranks in start.ranks]
    for stage, ((_, now), share) in enumerate(zip(chosen, shares, strict=True)):
        near = {now - 1, now, now + 1, *spread(1, share, _RATIO)} & set(range(1, share + 1))
        depths = [now] if constraints.in_flight or start.schedule == "gpipe" else sorted(near, reverse=True)
        for each in product(_recompute_choices(evaluator, start, stage), depths):
            yield replace(start, choices=(*chosen[:stage], each, *chosen[stage + 1 :]))
    is_full = all(depth >= share for (_, depth), share in zip(chosen, shares, strict=True))
    known = [schedule for _, schedule in variants(evaluator.planner.problem, len(shares), start.is_interleaved)]
    for schedule in dict.fromkeys([*known, "gpipe"] if constraints.schedule == "auto" else known):
        if schedule != "gpipe" or is_full:
            yield replace(start, schedule=schedule)


def _recompute_choices(evaluator: Evaluator, start: Candidate, stage: int) -> tuple[bool, ...]:
    """Returns whether a stage may recompute, or not: not for no need, where it has memory for all its micro-batches."""
    planner, ranks = evaluator.planner, start.ranks[stage]
    sized = planner.sized(start.num_micro_batches)
    share = -(-start.num_micro_batches // len(ranks))
    whole = planner.fixed_options(start)[stage]._replace(in_flight=share, needs_recompute=False)
    most = max(sum(rank in others for others in start.ranks) for rank in ranks)
    fits = most * peak_of(sized, whole).num_bytes <= min(planner.limits[rank] for rank in ranks)
    return sized.recompute_choices[:1] if fits else sized.recompute_choices


MOVES = (_move_cuts, _move_counts, _move_groups, _move_ranks, _move_choices)
