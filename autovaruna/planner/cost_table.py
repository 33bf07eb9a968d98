"""Reads a profile at any micro-batch size: small micro-batches are not linear, so times and bytes are interpolated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autovaruna.profiler.records import Profile

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each block at one micro-batch size; every array has one entry a block."""

    micro_batch_size: float
    forward_seconds: Array
    backward_seconds: Array
    saved_bytes: Array
    work_bytes: Array
    weight_seconds: Array
    split_seconds: Array
    deferred_bytes: Array

    @property
    def input_seconds(self) -> Array:
        """Seconds of a backward that leaves its weight gradients for later."""
        return np.maximum(self.backward_seconds - self.weight_seconds, 0.0) + self.split_seconds


class CostTable:
    """The costs of a profile as arrays, to be read at any micro-batch size.

    Two rules keep noise out: a larger micro-batch never costs less than a smaller one, and below the smallest
    measured size a cost falls no faster than in proportion.
    """

    def __init__(self, profile: Profile) -> None:
        sizes = np.array(profile.micro_batch_sizes, dtype=np.float64)
        order = np.argsort(sizes)
        self._sizes = sizes[order]
        names = [each.name for each in fields(Costs)[1:]]
        rows = (np.array([[getattr(cost, name) for cost in costs] for costs in profile.costs]) for name in names)
        self._rows = [np.maximum.accumulate(row.astype(np.float64)[order], axis=0) for row in rows]
        self.at = lru_cache(maxsize=16)(self._interpolated)  # a search asks for the same few sizes

    def _interpolated(self, micro_batch_size: float) -> Costs:
        """Interpolates linearly between the measured sizes, and extrapolates from the two nearest."""
        arrays = (_interpolate(rows, self._sizes, micro_batch_size) for rows in self._rows)
        return Costs(micro_batch_size, *arrays)


def _interpolate(rows: Array, sizes: Array, size: float) -> Array:
    """Returns the row at `size`; `rows` is ``(len(sizes), num_blocks)`` with ascending sizes and numbers."""
    if len(sizes) == 1:
        return np.asarray(rows[0] * (size / sizes[0]), dtype=np.float64)
    right = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    share = float((size - sizes[right - 1]) / (sizes[right] - sizes[right - 1]))
    row = rows[right - 1] + share * (rows[right] - rows[right - 1])
    if size < sizes[0]:
        row = np.maximum(row, rows[0] * (size / sizes[0]))
    return np.asarray(row, dtype=np.float64)
