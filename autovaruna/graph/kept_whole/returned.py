"""Describes what a module that is kept whole returns, for every batch size."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from autovaruna.graph.tree import Tree


class Join(str, Enum):
    """How what a module returns for parts of a batch becomes what it returns for all of it."""

    UNKNOWN = "unknown"
    SAMPLES = "samples"
    """Each part has its samples."""
    MEAN = "mean"
    """A mean over the samples, or nothing of them."""
    SUM = "sum"
    """A sum over the samples."""
    OTHER = "other"
    """It is in none of these ways."""


@dataclass(frozen=True)
class Line:
    """A tensor that a module returns, for every batch size.

    Attributes:
        lengths: slope and start of each dimension: it has ``slope * batch + start`` elements.
        order: its dimensions from the slowest in memory to the fastest.
        dtype: of its elements.
        join: how it follows from what the module returns for parts of the batch.
    """

    lengths: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    join: Join = Join.UNKNOWN

    def shape(self, batch: Any) -> list[Any]:
        """Returns its shape for a batch size, a number or a symbol."""
        return [slope * batch + start if slope else start for slope, start in self.lengths]

    def make(self, batch: Any, device: torch.device) -> Tensor:
        """Returns an empty tensor of its shape, strides and dtype."""
        shape, strides, step = self.shape(batch), [1] * len(self.order), 1
        for dimension in reversed(self.order):
            strides[dimension] = step
            step = step * shape[dimension]
        return torch.empty_strided(shape, strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Returned:
    """What a module returns: a structure, and its tensors."""

    tree: Tree
    tensors: tuple[Line, ...]
