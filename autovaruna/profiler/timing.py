"""Times work: samples long enough for the clock, without what every call costs.

Of the samples the lower quartile counts: what other processes take can only add to a sample, and they take it from some
blocks and not from others, which would unbalance a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter

import torch

from autovaruna.profiler.work import Work, empty_work

_SAMPLE_SECONDS = 200e-6
_MOST_REPEATS = 200
_LEAST_SHARE = 0.1
"""A measured time is never cut below this share of itself, however much of it a call costs."""

Seconds = tuple[float, float]
"""Of one forward and one backward."""


def time_work(work: Work, iterations: int, allowance_seconds: float, device: torch.device) -> Seconds:
    """Times forward and backward.

    Args:
        work: What to time; it has run once already.
        iterations: Samples to take.
        allowance_seconds: No further sample is begun after this time; one is taken in any case.
        device: Where it runs.

    Returns:
        Seconds of one forward and of one backward (0 if there is none), without what a call of an empty piece costs.
    """
    forward, backward = _samples(work, iterations, allowance_seconds, device)
    empty_forward, empty_backward = call_seconds(sum(value.requires_grad for value in work.values) or 1, device)
    return _without(forward, empty_forward), _without(backward, empty_backward) if work.needs_gradient else 0.0


@lru_cache(maxsize=64)
def call_seconds(num_values: int, device: torch.device) -> Seconds:
    """Returns the seconds that a call with `num_values` received tensors takes before it does anything."""
    return _samples(empty_work(num_values, device), 9, 1.0, device)


def _samples(work: Work, iterations: int, allowance_seconds: float, device: torch.device) -> Seconds:
    wait = _wait(device)
    started = perf_counter()
    first = _sample(work, 1, wait)
    repeats = min(_MOST_REPEATS, max(math.ceil(_SAMPLE_SECONDS / max(first[0], 1e-7)), 1))
    samples = [first] if repeats == 1 and perf_counter() - started > allowance_seconds else []
    while not samples or (len(samples) < iterations and perf_counter() - started < allowance_seconds):
        samples.append(_sample(work, repeats, wait))
    forwards, backwards = zip(*samples, strict=True)
    return _lower_quartile(forwards), _lower_quartile(backwards)


def _lower_quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def _sample(work: Work, repeats: int, wait: Callable[[], None]) -> Seconds:
    """Returns the seconds of one forward and one backward out of `repeats`."""
    wait()
    started = perf_counter()
    runs = [work.forward() for _ in range(repeats)]
    wait()
    middle = perf_counter()
    if work.needs_gradient:
        while runs:
            work.backward(runs.pop())
        wait()
    return (middle - started) / repeats, (perf_counter() - middle) / repeats


def _wait(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def _without(seconds: float, call: float) -> float:
    return max(seconds - call, seconds * _LEAST_SHARE)
