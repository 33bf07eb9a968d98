"""Draws the arguments with which a module that is kept whole is tried out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from autovaruna.graph.kept_whole.kept import is_differentiable
from autovaruna.graph.kept_whole.trial import Trial

_NEAR = 0.05


class Numbers(Enum):
    """Which numbers the arguments have, in the order in which they are tried: modules refuse some."""

    DRAWN = "drawn"
    SHARES = "shares"
    PLAIN = "plain"


def drawn_arguments(trial: Trial, numbers: Numbers, size: int) -> list[Tensor]:
    """Returns arguments for `size` samples; integers are zeros and ones, for they may be classes, or lengths.

    Args:
        trial: What is tried out.
        numbers: Which numbers.
        size: How many samples.
    """
    generator = torch.Generator().manual_seed(0)
    made = []
    for each in trial.inputs:
        shape = trial.shape_of(each, size)
        kind = torch.empty((), dtype=each.dtype)
        if is_differentiable(kind):
            drawn = normal(shape, each.dtype, generator)
            drawn = drawn.sigmoid() if numbers is Numbers.SHARES else drawn
            drawn = _NEAR * drawn if numbers is Numbers.PLAIN else drawn
        else:
            drawn = torch.randint(2, shape, generator=generator)
            drawn = torch.full_like(drawn, each.dtype is torch.bool) if numbers is Numbers.PLAIN else drawn
        made.append(drawn.to(trial.device, each.dtype).requires_grad_(each.requires_grad and trial.is_differentiated))
    return made


def normal(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns random numbers around zero, in the precision of float32."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
