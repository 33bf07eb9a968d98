"""Knows how much time there is between two steps of an optimizer."""

from __future__ import annotations

import time
from collections import deque

_SHARE = 0.9
"""How much of the shortest of the last gaps the next one lasts at the least."""
_NUM_GAPS = 3


class Gaps:
    """The last gaps between steps, from the end of one to the begin of the next."""

    def __init__(self) -> None:
        self._end: float | None = None
        self._is_running = False
        self._seconds: deque[float] = deque(maxlen=_NUM_GAPS)

    def note_begin(self) -> None:
        """Says that a step begins; a class of the script's own that calls its parent's step says it twice."""
        if self._end is not None and not self._is_running:
            self._seconds.append(time.monotonic() - self._end)
        self._is_running = True

    def note_end(self, *_: object) -> None:
        """Says that a step has ended; a hook of the optimizer."""
        self._is_running = False
        self._end = time.monotonic()

    def seconds_left(self) -> float | None:
        """Returns the time until the next step, as the last gaps say; None: not known."""
        if self._end is None or not self._seconds:
            return None
        gap = _SHARE * min(self._seconds)
        left = gap - (time.monotonic() - self._end)
        return left if left > 0 else gap  # the script has done something else since: the way to the step is all ahead
