"""Works with the loop's ``torch.amp.GradScaler``: its scale is in the stages' backward, and all ranks skip together.

A step has gone backward when ``model(...)`` returns, so the scale must be in its loss gradient before the loop applies
it: float16 gradients would vanish otherwise. And each rank sees overflow in its own parameters alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from autovaruna.errors import InputError
from autovaruna.runtime.optimizer import own_part
from autovaruna.runtime.world import World, gather_on_all

Unscaled = dict[torch.device, Tensor]


class LossScale:
    """Says by what factor the caller's loop will multiply the loss, as far as that is known before it does.

    Without a `scaler` it looks for the only one that the program has made since this library was imported.
    """

    def __init__(self, optimizer: Optimizer | None, scaler: GradScaler | None, world: World) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler.")
        self._optimizer = optimizer
        self._known: ref[GradScaler] | None = None if scaler is None else ref(scaler)
        self._num_looked_at, self._is_ambiguous = 0, False
        self._world, self._last = world, 1.0
        if optimizer is not None:
            _scale_of[optimizer] = ref(self)

    def before(self, is_half: bool) -> float:
        """Returns the factor to go backward with.

        Without a scaler it is one, or for float16 gradients the factor of the last backward: a loop may scale by hand.
        With several, which one is meant matters for these: an `InputError`.
        """
        if self._num_looked_at != _num_made:
            self._search()
        scaler = self._scaler
        if scaler is not None:
            return float(scaler.get_scale()) or 1.0
        if is_half and self._is_ambiguous:
            raise InputError(
                "The model has float16 gradients, and the program has several GradScalers: which one scales the loss? "
                "Say it: AutoVaruna(model, optimizer, scaler=scaler)."
            )
        return self._last if is_half else 1.0

    @property
    def words(self) -> str:
        """The scaler's scale, the same on every rank."""
        scaler = self._scaler
        return "none" if scaler is None else f"{scaler.get_scale():g}"

    @property
    def _scaler(self) -> GradScaler | None:
        """The loop's scaler, which lives as long as the loop keeps it."""
        return None if self._known is None else self._known()

    def after(self, factor: float) -> None:
        self._last = factor

    def _search(self) -> None:
        """Looks for the scaler, since the program has made new ones."""
        self._num_looked_at = _num_made
        if self._scaler is not None or self._optimizer is None:
            return
        if _enabled():
            gc.collect()  # one of an earlier run may only wait for this, on one rank longer than on another
        found = _enabled()
        self._known = ref(found[0]) if len(found) == 1 else None
        self._is_ambiguous = len(found) > 1

    def unscale(self, scaler: GradScaler, plain: Callable[[], Unscaled], found: Tensor) -> Unscaled:
        """Unscales this rank's gradients and returns what overflowed on any rank. Collective."""
        self._known = ref(scaler)
        own: Unscaled = {}

        def overflows() -> bool:
            own.update(plain())
            return any(bool(flag.item()) for flag in own.values())

        assert self._optimizer is not None
        with own_part(self._optimizer):
            flags = gather_on_all(self._world, overflows, "unscaling gradients")
        own = own or {found.device: found}  # a rank without gradients takes part, too
        if any(flags):
            for flag in own.values():
                flag.fill_(1.0)
        return own


_scale_of: WeakKeyDictionary[Optimizer, ref[LossScale]] = WeakKeyDictionary()
_scalers: WeakSet[GradScaler] = WeakSet()
"""Every GradScaler that the program has made since this module was imported, and still has."""
_num_made = 0


def _enabled() -> list[GradScaler]:
    return [scaler for scaler in list(_scalers) if scaler.is_enabled()]


def _watch_scalers() -> None:
    """Lets every scaler be known, and hear of overflow on any rank when it looks for it in an optimizer's gradients."""
    initialise, unscale = GradScaler.__init__, GradScaler._unscale_grads_

    @wraps(initialise)
    def noted(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        global _num_made
        initialise(scaler, *args, **kwargs)
        _scalers.add(scaler)
        _num_made += 1

    @wraps(unscale)
    def everywhere(
        scaler: GradScaler, optimizer: Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool
    ) -> Unscaled:
        plain = partial(unscale, scaler, optimizer, inverse, found, allow_fp16)
        known = _scale_of.get(optimizer)
        scale = None if known is None else known()
        return plain() if scale is None else scale.unscale(scaler, plain, found)

    GradScaler.__init__ = noted  # type: ignore[method-assign, assignment]
    GradScaler._unscale_grads_ = everywhere  # type: ignore[method-assign, assignment]


_watch_scalers()
