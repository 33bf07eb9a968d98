"""Marks the values of a traced graph that are those of the whole global batch, whichever micro-batch runs."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx


class Use(str, Enum):
    """What becomes of a value of the whole batch in the term of a loss."""

    PLAIN = "plain"
    """It is used as it is."""
    DIVISOR = "divisor"
    """It divides a sum over the samples of a micro-batch: the quotients are averaged, so it is given in proportion."""
    FACTOR = "factor"
    """It multiplies such a sum."""

    def of_share(self, value: Tensor | float, share: float) -> Tensor | float:
        """Returns what a micro-batch gets, whose loss has the weight `share` in that of the global batch."""
        if self is Use.PLAIN:
            return value
        wide = value.double() if isinstance(value, Tensor) else value
        return wide * share if self is Use.DIVISOR else wide / share


def of_batch(value: Any, use: Use, dtype: torch.dtype) -> Tensor:
    """Stands in a graph for `value` over the whole batch; run by itself, what it is given is the whole batch.

    Args:
        value: A tensor or number that follows from the inputs alone.
        use: What becomes of it.
        dtype: What it is turned into.
    """
    return value.to(dtype) if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=dtype)


def as_tensor(number: Any, dtype: torch.dtype) -> Tensor:
    """Returns a number as a tensor."""
    return torch.scalar_tensor(number, dtype=dtype)


def is_of_batch(node: fx.Node) -> bool:
    """Whether a node of a graph stands for a value of the whole batch."""
    return node.target is of_batch
