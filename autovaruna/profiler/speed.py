"""Measures how fast a rank's device is, by a fixed kernel."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter

import torch

from autovaruna.profiler.timing import wait_for

_LENGTH = {"cpu": 256, "cuda": 4096}
_LEAST_SAMPLES = 15
_LEAST_SECONDS = 0.04
"""Some turns of programs that share a core."""


@dataclass(frozen=True)
class Pace:
    """The seconds of a fixed kernel: a matrix product and a pass over memory.

    The ranks' relative speeds are the inverse ratios of these numbers. Where another program takes turns on a core,
    most short samples know nothing of it, as those of a profile; their mean says what a step gets.

    Attributes:
        typical: the median.
        mean: the mean over all.
    """

    typical: float
    mean: float


def measure_pace(device: torch.device) -> Pace:
    """Measures the fixed kernel, for long enough that programs that share a core with this one have had their turns."""
    generator = torch.Generator().manual_seed(0)
    length = _LENGTH.get(device.type, 256)
    matrix = torch.randn(length, length, generator=generator).to(device)
    _sample(matrix)
    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < _LEAST_SAMPLES or perf_counter() - begin < _LEAST_SECONDS:
        samples.append(_sample(matrix))
    return Pace(median(samples), fmean(samples))


def _sample(matrix: torch.Tensor) -> float:
    started = perf_counter()
    with torch.no_grad():
        for _ in range(2):
            torch.tanh(matrix @ matrix)
    wait_for(matrix.device)()
    return perf_counter() - started
