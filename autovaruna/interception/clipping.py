"""Lets PyTorch's own clipping join the norms of gradients that are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from autovaruna._torch import CLIP, NORM, clip_grad
from autovaruna.interception.installed import Undo, all_of, put

_OF_MODEL = "_autovaruna_model"
"""Attribute of the norm of a split model's gradients."""


class SplitGradients(Protocol):
    """The gradients of a model that is split over the ranks."""

    def norm(self, tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Returns the norm of gradients of all ranks. Collective."""

    def record_limit(self, max_norm: float) -> None:
        """Records what gradients are clipped to."""

    def here(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns those parameters whose gradients are on this rank."""


def join_norms(
    find: Callable[[Sequence[Tensor]], SplitGradients | None], before: Callable[[Sequence[Tensor]], None]
) -> Undo:
    """Lets ``clip_grad_norm_`` and ``get_total_norm`` of ``torch.nn.utils`` see the gradients of all ranks.

    That is collective then: every rank asks for the norm of the same gradients, of which some are elsewhere. `find`
    returns the model that tensors are gradients of; None: of none that is split. `before` is called before gradients of
    parameters are scaled.
    """
    plain_norm, plain_clip = getattr(clip_grad, NORM), getattr(clip_grad, CLIP)

    @wraps(plain_norm)
    def joined(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **options: Any
    ) -> Any:
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model = find(found)
        if model is None:
            return plain_norm(found, norm_type, error_if_nonfinite, *args, **options)
        total = model.norm(found, float(norm_type), error_if_nonfinite)
        setattr(total, _OF_MODEL, model)
        return total

    @wraps(plain_clip)
    def noting(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **options: Any) -> Any:
        model: SplitGradients | None = getattr(total_norm, _OF_MODEL, None)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before(parameters)
        if model is not None:
            model.record_limit(float(max_norm))
            parameters = model.here(parameters)
        return plain_clip(parameters, max_norm, total_norm, *args, **options)

    places = [(clip_grad, NORM, joined), (clip_grad, CLIP, noting), (torch.nn.utils, "get_total_norm", joined)]
    return all_of(*(put(*place) for place in places))
