"""Reads how long a device has worked for this rank, without the turns that other programs have taken in between.

A rank with one thread on the CPU reads its thread's own time: a block that takes longer than a turn of another program
would hold such turns in every sample, and what is kept of it would say them to runs that have the core for themselves.
What a step gets of a core, ranks' speeds say (speed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from time import perf_counter, thread_time

import torch

_LOOKS = 20
_FINE_SECONDS = 20e-6


def own_clock(device: torch.device) -> Callable[[], float]:
    """Returns a clock, in seconds; to read it waits until the device has done all that it was given."""
    if device.type != "cuda":
        return thread_time if torch.get_num_threads() == 1 and _is_fine() else perf_counter
    wait = wait_for(device)

    def read() -> float:
        wait()
        return perf_counter()

    return read


def wait_for(device: torch.device) -> Callable[[], None]:
    """Returns what waits until a device has done all that it was given; a host has, when a call returns."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


@lru_cache(maxsize=1)
def _is_fine() -> bool:
    """Says whether the thread's own time advances in small steps; there are systems on which it counts turns."""
    steps: list[float] = []
    last = thread_time()
    ends = perf_counter() + 1.0
    while len(steps) < _LOOKS and perf_counter() < ends:
        if (now := thread_time()) != last:
            steps.append(now - last)
            last = now
    return min(steps, default=1.0) <= _FINE_SECONDS
