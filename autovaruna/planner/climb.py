"""Improves a plan by small changes, each kept if its simulated step is shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.options import nearby_counts
from autovaruna.planner.placing import changed_ranks
from autovaruna.planner.problem import Problem
from autovaruna.planner.trials import Progress, Trials

_STEPS = (8, 4, 2, 1)
_RANKS, _ANYWHERE = len(_STEPS), len(_STEPS) + 1
_MOST_PLACES = 128
"""If cuts may be at no more places than this, all together, each is tried at all of them."""

Recut = Callable[[Planner, Candidate], Iterator[Candidate]]
"""Yields a candidate with cuts that suit its ranks."""


def climb_best(trials: Trials, most: int, most_seconds: float, recut: Recut, progress: Progress) -> None:
    """Changes the best plans by small steps: the simulated optimum is not quite that of the splits."""
    starts = trials.best_few(most)
    for k, candidate in enumerate(starts):
        progress("improving plans", k / len(starts))
        if not climb(trials, candidate, most_seconds / len(starts), recut):
            break


def climb(trials: Trials, start: Candidate, most_seconds: float, recut: Recut) -> bool:
    """Changes a candidate until no small change makes it better, or simulations took so many seconds.

    Cuts move by ever fewer segments; then ranks change places, and after each change that helps cuts move again. At
    last each cut is put anywhere: what crosses may be much less at a place that is far away.

    Returns:
        False if not even one simulation fits into the seconds.
    """
    planner = trials.planner
    problem, num_segments, seconds = planner.problem, planner.tables.num_segments, trials.ranked[start]
    limit = planner.spent_seconds + most_seconds
    if planner.spent_seconds + planner.step_costs(start) > limit:
        trials.was_cut_short = True
        return False
    level = 0
    while level <= _ANYWHERE:
        if level == _RANKS:
            near = _moved_ranks(planner, start, recut)
        elif level == _ANYWHERE:
            near = _cuts_anywhere(num_segments, start)
        else:
            near = _moved_cuts(problem, num_segments, start, _STEPS[level])
        better = None
        for other in near:
            if planner.spent_seconds > limit:
                trials.was_cut_short = True
                return True
            found = trials.attempt(other, seconds)
            if found < seconds:
                better, seconds = other, found
                break
        if better is None:
            level += 1
        else:
            start, level = better, min(level, _RANKS - 2)
    return True


def _moved_ranks(planner: Planner, start: Candidate, recut: Recut) -> Iterator[Candidate]:
    """Yields candidates with ranks in other places, with the same cuts and with those that suit them."""
    groups = tuple(dict.fromkeys(start.ranks))
    pattern = [groups.index(ranks) for ranks in start.ranks]
    for changed in changed_ranks(planner.problem, groups):
        other = replace(start, ranks=tuple(changed[group] for group in pattern))
        yield other
        yield from recut(planner, other)


def _moved_cuts(problem: Problem, num_segments: int, start: Candidate, step: int) -> Iterator[Candidate]:
    """Yields candidates with one cut moved, and with other numbers of micro-batches."""
    starts = start.starts
    bounds = [*starts, num_segments]
    for s in range(1, len(starts)):
        for moved in (starts[s] - step, starts[s] + step):
            if bounds[s - 1] < moved < bounds[s + 1]:
                yield _with_cut(start, s, moved)
    if step in (_STEPS[0], _STEPS[-1]):
        for count in nearby_counts(problem, start.num_micro_batches):
            yield replace(start, num_micro_batches=count)


def _cuts_anywhere(num_segments: int, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with one cut at every place between its neighbours, the nearest first, if these are few."""
    starts = start.starts
    bounds = [*starts, num_segments]
    if sum(bounds[s + 1] - bounds[s - 1] for s in range(1, len(starts))) > _MOST_PLACES:
        return
    for s in range(1, len(starts)):
        for place in sorted(range(bounds[s - 1] + 1, bounds[s + 1]), key=lambda place: abs(place - starts[s])):
            yield _with_cut(start, s, place)


def _with_cut(start: Candidate, stage: int, place: int) -> Candidate:
    """Returns the candidate with a stage that starts elsewhere."""
    return replace(start, starts=(*start.starts[:stage], place, *start.starts[stage + 1 :]))
