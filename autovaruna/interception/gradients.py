"""Lets PyTorch's own clipping, and its GradScaler, see the gradients of a split model on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from autovaruna._torch import CLIP, NORM, UNSCALE, clip_grad
from autovaruna.interception.installed import ProcessPiece, Undo, put_all

_OF_MODEL = "_autovaruna_model"  # attribute of the norm of a split model's gradients
Overflows = dict[torch.device, Tensor]
"""For each device, whether a gradient there is infinite or NaN: 0.0 or 1.0."""


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

    That is collective then. `find` returns the model that tensors are gradients of; None: of none that is split.
    `before` is called before gradients of parameters are scaled.
    """
    plain_norm, plain_clip = getattr(clip_grad, NORM), getattr(clip_grad, CLIP)

    @wraps(plain_norm)
    def joined(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **options: Any
    ) -> Any:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model = find(gradients)
        if model is None:
            return plain_norm(gradients, norm_type, error_if_nonfinite, *args, **options)
        total = model.norm(gradients, float(norm_type), error_if_nonfinite)
        setattr(total, _OF_MODEL, model)
        return total

    @wraps(plain_clip)
    def clipped(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **options: Any) -> Any:
        model: SplitGradients | None = getattr(total_norm, _OF_MODEL, None)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before(parameters)
        if model is not None:
            model.record_limit(float(max_norm))
            parameters = model.here(parameters)
        return plain_clip(parameters, max_norm, total_norm, *args, **options)

    return put_all((clip_grad, NORM, joined), (clip_grad, CLIP, clipped), (torch.nn.utils, "get_total_norm", joined))


class Unscaler(Protocol):
    """Unscales the gradients of an optimizer on all ranks."""

    def unscale(self, scaler: GradScaler, plain: Callable[[], Overflows], found: Tensor) -> Overflows:
        """Returns what overflowed on any rank; `plain` does it for this one."""


UNSCALERS: WeakKeyDictionary[Optimizer, ReferenceType[Unscaler]] = WeakKeyDictionary()
_scalers: WeakSet[GradScaler] = WeakSet()
_num_recorded = 0


def num_recorded() -> int:
    """Returns how many scalers have been recorded: it grows with each new one."""
    return _num_recorded


def enabled_scalers() -> list[GradScaler]:
    """Returns the scalers that are known, are in use, and that the program still has."""
    return [scaler for scaler in list(_scalers) if scaler.is_enabled()]


def _record_scaler(scaler: GradScaler) -> None:
    global _num_recorded
    if scaler not in _scalers:
        _scalers.add(scaler)
        _num_recorded += 1


def record_scalers() -> None:
    """Records the scalers that the program has made before `SCALERS` saw to it: those that refer to their class."""
    kinds: list[type] = [GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for each in gc.get_referrers(*kinds):
        if isinstance(each, GradScaler):
            _record_scaler(each)


def _watch_scalers() -> Undo:
    """Lets every scaler be known, and hands on what it does to the gradients of optimizers in `UNSCALERS`."""
    initialise: Any = GradScaler.__init__
    unscale: Any = getattr(GradScaler, UNSCALE)

    @wraps(initialise)
    def seen(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        initialise(scaler, *args, **kwargs)
        _record_scaler(scaler)

    @wraps(unscale)
    def everywhere(scaler: GradScaler, optimizer: Optimizer, inverse: Tensor, found: Tensor, *rest: Any) -> Overflows:
        plain = partial(unscale, scaler, optimizer, inverse, found, *rest)
        known = UNSCALERS.get(optimizer)
        owner = None if known is None else known()
        overflows: Overflows = plain() if owner is None else owner.unscale(scaler, plain, found)
        return overflows

    return put_all((GradScaler, "__init__", seen), (GradScaler, UNSCALE, everywhere))


SCALERS = ProcessPiece(_watch_scalers)
