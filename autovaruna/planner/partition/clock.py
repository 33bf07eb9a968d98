"""Ends what is under way when time is over."""

from __future__ import annotations

import time


def check_time(deadline: float) -> None:
    """Does nothing until a deadline on ``time.monotonic``'s clock.

    Raises:
        TimeoutError: it is past.
    """
    if time.monotonic() > deadline:
        raise TimeoutError("the search ran out of time")
