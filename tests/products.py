"""How much of a product of cases runs: a part in which every value of every factor occurs, or all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

WHOLE = bool(os.environ.get("WHOLE_PRODUCTS"))
"""Whether all of it runs; ``make test-whole`` asks for that."""


Each, Other = TypeVar("Each"), TypeVar("Other")


def diagonal(cases: Iterable[Each], setups: Iterable[Other]) -> list[tuple[Each, Other]]:
    """Returns each case with the setups that are its turn, so that each setup has one case; or all pairs."""
    every = list(cases)
    return [(case, setup) for k, setup in enumerate(setups) for case in (every if WHOLE else [every[k % len(every)]])]


def some(cases: Sequence[Each], usual: int) -> list[Each]:
    """Returns about `usual` of some cases that are much alike, evenly spread, or all of them."""
    return list(cases if WHOLE else cases[:: max(len(cases) // usual, 1)])


def drawn_seeds(usual: int, times: int = 1) -> range:
    """Returns the seeds of drawn cases: `usual`, or `times` as many as DRAWN_GRAPHS says, from DRAWN_FROM on."""
    first, asked = int(os.environ.get("DRAWN_FROM", "0")), os.environ.get("DRAWN_GRAPHS")
    return range(first, first + (times * int(asked) if asked else usual))
