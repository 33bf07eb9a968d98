"""Keeps Python's collector of garbage from taking a tenth of the tests' time."""

from __future__ import annotations

import gc

SELDOM = (20_000, 10, 20)


def spare_collector() -> None:
    """Leaves out all that has been imported, which the collector would go over again and again; lets it look seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
