"""Unscales and clips the gradients of a step, and says whether any overflowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from autovaruna.api import AutoVaruna
from autovaruna.varuna.loss_scale import StepScale

Gradients = Sequence[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True)
class Finished:
    """What is known of the gradients of a step.

    Attributes:
        has_overflow: whether one of them is not finite, on any rank.
        norm: of all of them, before clipping; None: nobody asked.
    """

    has_overflow: bool = False
    norm: float | None = None


def put_aside(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Takes gradients that are not scaled out of the way of those that will be; returns them."""
    held = [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    return held


def finish(
    model: AutoVaruna,
    parameters: Sequence[nn.Parameter],
    scale: StepScale | None,
    earlier: Gradients,
    max_norm: float | None,
) -> Finished:
    """Unscales gradients, adds those of earlier steps, and clips them. Collective.

    Args:
        model: The model.
        parameters: Those of this rank.
        scale: Of the loss; it follows what overflows. None: there is none.
        earlier: What `put_aside` returned.
        max_norm: Most that the norm of all gradients may be; None: anything.
    """
    if scale is None:
        return Finished(norm=None if max_norm is None else model.clip_grad_norm_(max_norm).item())
    scale.unscale(parameters)
    for parameter, gradient in earlier:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    norm = model.clip_grad_norm_(math.inf if max_norm is None else max_norm).item()
    has_overflow = not math.isfinite(norm)
    scale.update(has_overflow)
    return Finished(has_overflow, norm)
