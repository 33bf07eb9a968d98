"""Measures how fast a rank's device is, by a fixed kernel."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

_LENGTH = {"cpu": 256, "cuda": 4096}
_NUM_SAMPLES = 15


def measure_speed(device: torch.device) -> float:
    """Returns the seconds of a fixed kernel: a matrix product and a pass over memory.

    The ranks' relative speeds are the inverse ratios of these numbers.
    """
    generator = torch.Generator().manual_seed(0)
    length = _LENGTH.get(device.type, 256)
    matrix = torch.randn(length, length, generator=generator).to(device)
    _sample(matrix)
    return median(_sample(matrix) for _ in range(_NUM_SAMPLES))


def _sample(matrix: torch.Tensor) -> float:
    started = perf_counter()
    with torch.no_grad():
        for _ in range(2):
            torch.tanh(matrix @ matrix)
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return perf_counter() - started
