"""Tunes those plans of a small problem that no rule for depths made good, but whose stages leave room for better ones.

The rules give every stage a depth and recompute by what is behind it. Where ranks differ, or memory is short, what is
best for some cuts and ranks may be a mixture that no rule comes near. By any rule these take so long, then, that they
are not among the best; or they do not fit. What their stages take alone says whether they can be better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autovaruna.planner.bounds.deepest import deepest
from autovaruna.planner.bounds.proof import PROVEN
from autovaruna.planner.records import Plan
from autovaruna.planner.settling import Found, excess_bytes
from autovaruna.planner.tuning import BETTER, Tuning, changed_in_pairs, seconds_of

Hopeful = tuple[float, Found]
"""What no depths and no schedule let a plan beat, and the plan."""

_MOST_SECONDS, _MOST_SECONDS_FOR_ANY = 2.0, 2.5
"""What simulations may take, by the count of each planner: more where nothing else fits."""
_SHARE_OF_A_LOOK, _SHARE_OF_A_HOPE = 0.4, 0.25
"""Of that, to see which plans are better as they are, and to tune one of them."""


def tuned_hopes(hopeful: Sequence[Hopeful], least_seconds: float) -> Plan | None:
    """Returns the best plan that comes of some that may be better than what is known; None if none does.

    Where nothing is known that fits, what lacks least memory comes first, else what is better as it is, and then what
    may be fastest.

    Args:
        hopeful: plans.
        least_seconds: of the best plan that is known; infinite if there is none.
    """
    ends = {id(planner): planner.spent_seconds for _, (planner, _, _) in hopeful}
    if least_seconds == math.inf:
        most_seconds, ordered = _MOST_SECONDS_FOR_ANY, sorted(hopeful, key=_excess_bytes)
    else:
        most_seconds, within = _MOST_SECONDS, _within_memory(hopeful, least_seconds)
        looks = {key: end + _SHARE_OF_A_LOOK * most_seconds for key, end in ends.items()}
        ordered = _better_first(within, least_seconds, looks)
    best: Found | None = None
    for hope in ordered:
        planner, candidate, plan = hope[1]
        end = ends[id(planner)] + most_seconds
        if _least_seconds(hope) >= least_seconds * PROVEN or planner.spent_seconds > end:
            continue
        end = min(end, planner.spent_seconds + _SHARE_OF_A_HOPE * most_seconds)
        tuning = Tuning(planner, candidate, plan, end, least_seconds)
        found = tuning.run() or tuning.settled
        if found is not None and seconds_of(found) < least_seconds * BETTER:
            best, least_seconds = (planner, candidate, found), seconds_of(found)
    if best is None:
        return None
    planner, _, plan = (*changed_in_pairs(best), best)[0]
    return planner.predict_whole(plan)


def _within_memory(hopeful: Sequence[Hopeful], least_seconds: float) -> list[Hopeful]:
    """Returns those that may be faster within the memory that there is, what may be fastest first.

    What ranks that hold several stages have room for depends on when they run: it is not asked.
    """
    found: list[Hopeful] = []
    for hope in hopeful:
        bound, (planner, candidate, _) = hope
        if _least_seconds(hope) >= least_seconds * PROVEN:
            continue
        if candidate.is_interleaved:
            found.append(hope)
            continue
        deep = deepest(planner, candidate, bound)
        if deep is not None and deep[0] < least_seconds * PROVEN:
            found.append((deep[0], (planner, *deep[1:])))
    return sorted(found, key=_least_seconds)


def _better_first(hopes: Sequence[Hopeful], least_seconds: float, ends: Mapping[int, float]) -> list[Hopeful]:
    """Returns the hopes in their order, but those first that are better than what is known before they are tuned."""

    def is_better(hope: Hopeful) -> bool:
        planner, candidate, plan = hope[1]
        if candidate.is_interleaved or planner.spent_seconds > ends[id(planner)]:
            return False
        limits, predicted = planner.limits, planner.predict(plan, least_seconds)
        return predicted is not None and not excess_bytes(planner, planner.predict_whole(predicted, limits))

    return sorted(hopes, key=lambda hope: not is_better(hope))


def _least_seconds(hope: Hopeful) -> float:
    return seconds_of(replace(hope[1][2], predicted_seconds=hope[0]))


def _excess_bytes(hope: Hopeful) -> float:
    planner, _, plan = hope[1]
    return excess_bytes(planner, planner.predict_whole(plan))
