"""Measures how fast a rank's device is, by a fixed kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter

import torch

from autovaruna.profiler.own_clock import own_clock

_LENGTH = {"cpu": 256, "cuda": 4096}
_LEAST_SAMPLES = 15
_LEAST_SECONDS, _MOST_SECONDS = 0.04, 0.2
"""Some turns of programs that share a core, and many."""
_SHARED = 1.2
"""A core that takes so many times a rank's own time is shared."""


@dataclass(frozen=True)
class Pace:
    """The seconds of a fixed kernel: a matrix product and a pass over memory.

    The ranks' relative speeds are the inverse ratios of these numbers. Where other programs take turns on a core, a
    rank's own time knows nothing of it, as that of a profile; what has passed from begin to end says what a step gets.

    Attributes:
        typical: the median of the rank's own time.
        mean: what has passed, over all samples.
    """

    typical: float
    mean: float


def measure_pace(device: torch.device) -> Pace:
    """Measures the fixed kernel, for long enough that programs that share a core with this one have had their turns."""
    now = own_clock(device)
    generator = torch.Generator().manual_seed(0)
    length = _LENGTH.get(device.type, 256)
    matrix = torch.randn(length, length, generator=generator).to(device)
    _run(matrix)
    own: list[float] = []
    passed: list[float] = []
    begin = perf_counter()
    while not _are_enough(own, passed, perf_counter() - begin):
        started, own_started = perf_counter(), now()
        _run(matrix)
        own.append(now() - own_started)
        passed.append(perf_counter() - started)
    return Pace(median(own), fmean(passed))


def _are_enough(own: Sequence[float], passed: Sequence[float], seconds: float) -> bool:
    """Says whether samples that took so many seconds tell what other programs take; more are needed if they do."""
    if len(own) < _LEAST_SAMPLES or seconds < _LEAST_SECONDS:
        return False
    return seconds >= _MOST_SECONDS or fmean(passed) < _SHARED * median(own)


def _run(matrix: torch.Tensor) -> None:
    with torch.no_grad():
        for _ in range(2):
            torch.tanh(matrix @ matrix)
