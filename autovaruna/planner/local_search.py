"""Improves plans by moves that shorten the simulated step: cuts, micro-batches, ranks, and what each stage holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, product

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import Evaluator
from autovaruna.planner.problem import FEW_RANKS
from autovaruna.planner.rank_memory import Choices, choices_of
from autovaruna.planner.search_space import (
    changed_ranks,
    fewer_replicas,
    nearby_counts,
    spread,
    stages_per_rank,
    variants,
)
from autovaruna.planner.shapes import cut_for_ranks

BETTER = 0.9995
"""What a move has to save: a plan that is hardly faster is not worth the next simulations."""
_NEARLY = 1.05
"""What takes no longer than so many times the seconds is kept, to begin from it later."""
_STEPS = (64, 32, 16, 8, 4, 2, 1)
"""Segments that a cut is moved by: the farthest first, since what crosses may be much less at a place far away."""
_RATIO = 1.5
"""Of many depths, each that is tried is greater than the one before by this."""
_MOST_TOGETHER = 2560
"""Ways to change a little what all stages hold, or two of them, of which all are tried."""
_MOST_OF_A_ROUND = 200_000
"""Acts of one change of what each stage holds: what takes more is not changed."""

Move = Callable[[Planner, Candidate], Iterator[Candidate]]
"""Yields candidates that differ little from one."""


def improve(
    evaluator: Evaluator,
    start: Candidate,
    most_acts: float,
    moves: Sequence[Move],
    is_new: Callable[[Candidate], bool] = lambda candidate: True,
) -> None:
    """Changes a candidate until no move makes it better, or simulations took so many acts.

    Each kind of move is tried when those before it are of no use; after a success they begin anew. What is no news
    has been changed before: no more is tried from there.
    """
    planner, seconds, kind = evaluator.planner, evaluator.plans[start].predicted_seconds, 0
    limit = planner.num_acts + most_acts
    while kind < len(moves):
        for other in filter(is_new, moves[kind](planner, start)):
            if planner.count_candidate() + planner.acts_of(other) > limit:
                evaluator.was_cut_short = True
                return
            found = evaluator.attempt(other, seconds * (BETTER if other.choices else _NEARLY), like=start)
            if found < seconds * BETTER:
                start, seconds, kind = other, min(found, evaluator.attempt(other, found)), 0
                break
        else:
            kind += 1


def move_cuts(planner: Planner, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with one cut moved, by ever fewer segments."""
    starts, bounds = start.starts, [*start.starts, planner.tables.num_segments]
    for step, s in product(_STEPS, range(1, len(starts))):
        for moved in (starts[s] - step, starts[s] + step):
            if bounds[s - 1] < moved < bounds[s + 1]:
                yield replace(start, starts=(*starts[:s], moved, *starts[s + 1 :]))


def move_groups(planner: Planner, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with one stage on the ranks of others, where ranks hold several."""
    most = stages_per_rank(planner.problem)
    for stage, other in product(range(len(start.ranks)), dict.fromkeys(start.ranks)) if start.is_interleaved else ():
        near = start.ranks[max(stage - 1, 0) : stage + 2]
        if other not in near and start.ranks.count(start.ranks[stage]) > 1 and start.ranks.count(other) < most:
            yield replace(start, ranks=(*start.ranks[:stage], other, *start.ranks[stage + 1 :]), choices=())


def move_counts(planner: Planner, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with other numbers of micro-batches."""
    for count in nearby_counts(planner.problem, start.num_micro_batches):
        yield replace(start, num_micro_batches=count, choices=())


def move_ranks(planner: Planner, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with ranks in other places, or fewer, with the same cuts and with those that suit them."""
    groups = tuple(dict.fromkeys(start.ranks))
    pattern = [groups.index(ranks) for ranks in start.ranks]
    changes = changed_ranks(planner.problem, groups)
    for changed in chain(fewer_replicas(planner.problem, groups), changes):
        ranks = tuple(changed[group] for group in pattern)
        yield replace(start, ranks=ranks, choices=())
        if planner.problem.cluster.num_ranks <= FEW_RANKS:
            other = cut_for_ranks(planner, start.num_micro_batches, ranks)
            if other:
                yield other


def move_choices(evaluator: Evaluator) -> Move:
    """Returns the move that has stages hold more or less: by depths and recompute."""

    def moved(planner: Planner, start: Candidate) -> Iterator[Candidate]:
        plan = evaluator.plans[start]
        if planner.acts_of(start) * plan.num_stages <= _MOST_OF_A_ROUND:
            chosen = replace(start, schedule=plan.schedule, choices=choices_of(plan.stages))
            yield from _changed_choices(planner, chosen)

    return moved


def _changed_choices(planner: Planner, start: Candidate) -> Iterator[Candidate]:
    """Yields a candidate that says what its stages hold with other choices of one stage, or another schedule.

    Where they are few, also with depths near those of all stages, or of two: one alone may be of no use.
    """
    constraints, counts, chosen = planner.problem.constraints, [len(ranks) for ranks in start.ranks], start.choices
    shares = [-(-start.num_micro_batches // count) for count in counts]
    has_fixed_depths = constraints.in_flight or start.schedule == "gpipe"
    recompute, options = planner.sized(start.num_micro_batches).recompute_choices, list[list[Choices]]()
    for stage, ((_, now), share) in enumerate(zip(chosen, shares, strict=True)):
        near = {now - 1, now, now + 1, *spread(1, share, _RATIO)} & set(range(1, share + 1))
        depths = [now] if has_fixed_depths else sorted(near, reverse=True)
        options.append(list(product(recompute, depths)))
        for each in options[-1]:
            yield replace(start, choices=(*chosen[:stage], each, *chosen[stage + 1 :]))
    is_full = all(depth >= share for (_, depth), share in zip(chosen, shares, strict=True))
    known = [schedule for _, schedule in variants(planner.problem, len(counts), start.is_interleaved)]
    for schedule in dict.fromkeys([*known, "gpipe"] if constraints.schedule == "auto" else known):
        if schedule != "gpipe" or is_full:
            yield replace(start, schedule=schedule)
    near_now = [
        [each for each in some if each[0] == now[0] and abs(each[1] - now[1]) <= 1]
        for some, now in zip(options, chosen, strict=True)
    ]
    every = tuple(range(len(chosen)))
    together = [every] if math.prod(map(len, near_now)) <= _MOST_TOGETHER else list(combinations(every, 2))
    if sum(math.prod(len(near_now[stage]) for stage in stages) for stages in together) <= _MOST_TOGETHER:
        for stages in together:
            for some in product(*[near_now[stage] for stage in stages]):
                changed = dict(zip(stages, some, strict=True))
                yield replace(start, choices=tuple(changed.get(stage, chosen[stage]) for stage in every))
