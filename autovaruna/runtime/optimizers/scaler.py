"""Works with the loop's ``torch.amp.GradScaler``: its scale is in the stages' backward, and all ranks skip together.

A step has gone backward when ``model(...)`` returns, so the scale must be in its loss gradient before the loop applies
it: float16 gradients would vanish otherwise. And each rank sees overflow in its own parameters alone, while all must
skip a step, and change the scale, together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from autovaruna.errors import InputError
from autovaruna.runtime.optimizers.own_part import own_part
from autovaruna.runtime.worlds.on_all import gather_on_all
from autovaruna.runtime.worlds.world import World

_MOST_SEARCHES = 8
Unscale = Callable[[Optimizer, Tensor, Tensor, bool], dict[torch.device, Tensor]]


class LossScale:
    """Says by what factor the caller's loop will multiply the loss, as far as that is known before it does.

    Args:
        optimizer: The user's optimizer.
        scaler: The user's scaler; None: it is looked for in the program.
        world: The ranks.

    Raises:
        InputError: the scaler is none.
    """

    def __init__(self, optimizer: Optimizer | None, scaler: GradScaler | None, world: World) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler.")
        self._optimizer = optimizer
        self._known: ref[GradScaler] | None = None
        self._world = world
        self._is_ambiguous = False
        self._joined: set[int] = set()
        self._seen: set[float] = set()
        self._last = 1.0
        if scaler is not None:
            self._join(scaler)
            self._known = ref(scaler)

    def before(self, is_half: bool) -> float:
        """Returns the factor to go backward with.

        Without a scaler it is one, or for float16 gradients the factor of the last backward: a loop may scale by hand.

        Args:
            is_half: Whether gradients are float16, so that it matters.

        Raises:
            InputError: it matters, and several scalers may be meant.
        """
        if self._scaler is None and not self._seen:
            self._search(1.0)
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
        """Hears of the factor that the loop has applied."""
        self._last = factor
        if self._scaler is None:
            self._search(factor)

    def _search(self, factor: float) -> None:
        """Looks for the scaler; again whenever another factor comes in, since it may be made at any time."""
        if factor in self._seen or len(self._seen) >= _MOST_SEARCHES or self._optimizer is None:
            return
        self._seen.add(factor)
        if _enabled():
            gc.collect()  # one of an earlier run may only wait for this, on one rank longer than on another
        found = _enabled()
        for scaler in found:
            self._join(scaler)
        self._known = ref(found[0]) if len(found) == 1 else None
        self._is_ambiguous = len(found) > 1

    def _join(self, scaler: GradScaler) -> None:
        """Lets a scaler hear of overflow on any rank, whenever it looks for it in the optimizer's gradients."""
        if id(scaler) in self._joined:
            return
        self._joined.add(id(scaler))
        unscale: Unscale = scaler._unscale_grads_
        known = ref(scaler)

        def unscale_everywhere(
            optimizer: Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool
        ) -> dict[torch.device, Tensor]:
            if optimizer is not self._optimizer:
                return unscale(optimizer, inverse, found, allow_fp16)
            self._known = known
            with own_part(optimizer):
                return self._share(lambda: unscale(optimizer, inverse, found, allow_fp16), found)

        scaler._unscale_grads_ = unscale_everywhere  # type: ignore[method-assign, assignment]

    def _share(self, unscale: Callable[[], dict[torch.device, Tensor]], found: Tensor) -> dict[torch.device, Tensor]:
        """Unscales this rank's gradients and returns what overflowed on any rank. Collective."""
        own: dict[torch.device, Tensor] = {}

        def overflows() -> bool:
            own.update(unscale())
            return any(bool(flag.item()) for flag in own.values())

        flags = gather_on_all(self._world, overflows, "unscaling gradients")
        own = own or {found.device: found}  # a rank without gradients takes part, too
        if any(flags):
            for flag in own.values():
                flag.fill_(1.0)
        return own


_scalers: WeakSet[GradScaler] = WeakSet()
"""Every GradScaler of the program: those that are there now, and those to come.

The list of all objects is asked for once, while this module is imported: as long as it is there, a tuple that another
thread is filling cannot grow.
"""
_scalers.update(each for each in gc.get_objects() if issubclass(type(each), GradScaler))
_initialise = GradScaler.__init__


@wraps(_initialise)
def _noted(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
    _initialise(scaler, *args, **kwargs)
    _scalers.add(scaler)


GradScaler.__init__ = _noted  # type: ignore[method-assign, assignment]


def _enabled() -> list[GradScaler]:
    return [scaler for scaler in list(_scalers) if scaler.is_enabled()]
