"""Refuses PyTorch's own clipping where it would clip by the norm of one rank's part of the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from autovaruna.errors import InputError
from autovaruna.runtime.placement import OwnedState

_split: WeakSet[OwnedState] = WeakSet()


def refuse_local_norms(state: OwnedState) -> None:
    """Refuses ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` for gradients of a model that is split.

    Args:
        state: The model's parameters, of which this rank has but some.
    """
    _split.add(state)
    module: Any = torch.nn.utils.clip_grad
    plain = getattr(module, "_get_total_norm", None)
    if plain is None or hasattr(plain, "refuses_local_norms"):
        return

    @wraps(plain)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        _check(found)
        return plain(found, *args, **kwargs)

    checked.refuses_local_norms = True  # type: ignore[attr-defined]
    module._get_total_norm = checked
    if hasattr(torch.nn.utils, "get_total_norm"):
        torch.nn.utils.get_total_norm = checked


def _check(tensors: Iterable[Tensor]) -> None:
    given = {id(each) for each in tensors}
    for state in _split:
        if any(id(each.grad) in given for each in state.parameters().values()):
            raise InputError(
                "torch.nn.utils got gradients of a model that is split over the ranks: it would clip by the norm of "
                "this rank's part. Expected model.clip_grad_norm_(max_norm), on every rank."
            )
