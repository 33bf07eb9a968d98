"""Knows the GradScalers of the program, and has somebody else look for overflow in an optimizer's gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import chain
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from autovaruna._torch import UNSCALE
from autovaruna.interception.installed import ProcessPiece, Undo, all_of, put

Unscaled = dict[torch.device, Tensor]
"""For each device, whether a gradient there is infinite or NaN: 0.0 or 1.0."""


class Unscaler(Protocol):
    """Unscales the gradients of an optimizer on all ranks."""

    def unscale(self, scaler: GradScaler, plain: Callable[[], Unscaled], found: Tensor) -> Unscaled:
        """Returns what overflowed on any rank; `plain` does it for this one."""


UNSCALERS: WeakKeyDictionary[Optimizer, ReferenceType[Unscaler]] = WeakKeyDictionary()
_scalers: WeakSet[GradScaler] = WeakSet()
_num_seen = 0


def num_seen() -> int:
    """Returns how many scalers have been seen: it grows with each new one."""
    return _num_seen


def enabled_scalers() -> list[GradScaler]:
    """Returns the scalers that are known, are in use, and that the program still has."""
    return [scaler for scaler in list(_scalers) if scaler.is_enabled()]


def _see(scaler: GradScaler) -> None:
    global _num_seen
    if scaler not in _scalers:
        _scalers.add(scaler)
        _num_seen += 1


def look_in_callers() -> None:
    """Takes note of scalers in variables of the functions that are running, or in attributes of what these hold."""
    frame = sys._getframe(1)
    while frame is not None:
        for value in chain(frame.f_locals.values(), frame.f_globals.values()):
            for each in (value, *_attributes(value)):
                if isinstance(each, GradScaler):
                    _see(each)
        frame = frame.f_back  # type: ignore[assignment]


def _attributes(value: Any) -> Iterator[Any]:
    own = getattr(value, "__dict__", None)
    return iter(list(own.values())) if isinstance(own, dict) and not isinstance(value, type(sys)) else iter(())


def _watch() -> Undo:
    """Lets every scaler be known, and hands on what it does to the gradients of optimizers in `UNSCALERS`."""
    initialise: Any = GradScaler.__init__
    unscale: Any = getattr(GradScaler, UNSCALE)

    @wraps(initialise)
    def seen(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        initialise(scaler, *args, **kwargs)
        _see(scaler)

    @wraps(unscale)
    def everywhere(scaler: GradScaler, optimizer: Optimizer, inverse: Tensor, found: Tensor, *rest: Any) -> Unscaled:
        plain = partial(unscale, scaler, optimizer, inverse, found, *rest)
        known = UNSCALERS.get(optimizer)
        owner = None if known is None else known()
        made: Unscaled = plain() if owner is None else owner.unscale(scaler, plain, found)
        return made

    return all_of(put(GradScaler, "__init__", seen), put(GradScaler, UNSCALE, everywhere))


SCALERS = ProcessPiece(_watch)
