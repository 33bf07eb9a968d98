"""Improves a plan by small changes, each kept if its simulated step is shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autovaruna.planner.candidate import Candidate
from autovaruna.planner.options import nearby_counts
from autovaruna.planner.placing import changed_ranks
from autovaruna.planner.problem import Problem

_STEPS = (8, 4, 2, 1)

Predict = Callable[[Candidate, float], float]
"""Returns the predicted seconds of a candidate, infinite if they are not below some seconds."""
Predicate = Callable[[], bool]
Recut = Callable[[Candidate], Iterator[Candidate]]
"""Yields a candidate with cuts that suit its ranks."""


def climb(
    problem: Problem,
    num_segments: int,
    start: Candidate,
    seconds: float,
    predict: Predict,
    recut: Recut,
    has_time: Predicate,
) -> None:
    """Changes a candidate, predicted to take so many seconds, until no small change makes it better.

    Cuts move by ever fewer segments; then ranks change places, and after each change that helps cuts move again.
    """
    level = 0
    while level <= len(_STEPS):
        if level < len(_STEPS):
            near = _moved_cuts(problem, num_segments, start, _STEPS[level])
        else:
            near = _moved_ranks(problem, start, recut)
        better = None
        for other in near:
            if not has_time():
                return
            found = predict(other, seconds)
            if found < seconds:
                better, seconds = other, found
                break
        if better is None:
            level += 1
        else:
            start, level = better, min(level, len(_STEPS) - 2)


def _moved_ranks(problem: Problem, start: Candidate, recut: Recut) -> Iterator[Candidate]:
    """Yields candidates with ranks in other places, with the same cuts and with those that suit them."""
    for ranks in changed_ranks(problem, start.ranks):
        other = replace(start, ranks=ranks)
        yield other
        yield from recut(other)


def _moved_cuts(problem: Problem, num_segments: int, start: Candidate, step: int) -> Iterator[Candidate]:
    """Yields candidates with one cut moved, and with other numbers of micro-batches."""
    starts = start.starts
    bounds = [*starts, num_segments]
    for s in range(1, len(starts)):
        for moved in (starts[s] - step, starts[s] + step):
            if bounds[s - 1] < moved < bounds[s + 1]:
                yield replace(start, starts=(*starts[:s], moved, *starts[s + 1 :]))
    if step in (_STEPS[0], _STEPS[-1]):
        for count in nearby_counts(problem, start.num_micro_batches):
            yield replace(start, num_micro_batches=count)
