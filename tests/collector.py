"""Keeps Python's collector of garbage from taking a tenth of the tests' time."""

from __future__ import annotations

import gc

SELDOM = (20_000, 10, 20)


def spare_collector() -> None:
    """Leaves out all that has been imported, which the collector would go over again and again; lets it look seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)


def look_for_a_moment() -> None:
    """Has ranks that are processes look at their speeds as shortly as those that are threads do."""
    from autovaruna.profiler import measure  # not at the top: torch comes with it

    measure._LEAST_SECONDS = measure._MOST_SECONDS = 0.0
