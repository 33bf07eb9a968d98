"""Holds that something takes no longer than it may, on any machine that is not much slower than ours."""

from __future__ import annotations

import time
from collections.abc import Callable


def takes_at_most(seconds: float, run: Callable[[], object]) -> bool:
    """Says whether `run` takes at most so much of this thread's own time in one of three tries."""

    def own_seconds() -> float:
        begin = time.thread_time()
        run()
        return time.thread_time() - begin

    return any(own_seconds() <= seconds for _ in range(3))
