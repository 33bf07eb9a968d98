"""Works with the loop's ``torch.amp.GradScaler``: its scale is in the stages' backward, and all ranks skip together.

A step has gone backward when ``model(...)`` returns, so the scale must be in its loss gradient before the loop applies
it: float16 gradients would vanish otherwise. And each rank sees overflow in its own parameters alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from autovaruna.errors import InputError
from autovaruna.interception.gradients import UNSCALERS, Overflows, enabled_scalers, num_recorded
from autovaruna.interception.optimizer_proxy import cut_groups
from autovaruna.ranks.world import World
from autovaruna.runtime.optimizer import OWNERSHIP


class LossScale:
    """Says by what factor the caller's loop will multiply the loss, as far as that is known before it does.

    Without a `scaler` it looks for the only one that is known in the program.
    """

    def __init__(self, optimizer: Optimizer | None, scaler: GradScaler | None, world: World) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler.")
        self._optimizer: Optimizer | None = None
        self._known: ref[GradScaler] | None = None if scaler is None else ref(scaler)
        self._num_looked_at, self._is_ambiguous = 0, False
        self._world, self._last = world, 1.0
        self._unseen_factor: float | None = None  # of the last float16 step, if it went backward without a scaler
        if optimizer is not None:
            self.follow(optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """Takes the optimizer whose gradients a scaler unscales."""
        self._optimizer, self._num_looked_at = optimizer, 0
        UNSCALERS[optimizer] = ref(self)

    def expected_factor(self, is_half: bool) -> float:
        """Returns the factor to go backward with.

        Without a scaler it is one, or for float16 gradients the factor of the last backward: a loop may scale by hand.
        With several, which one is meant matters for these: an `InputError`.
        """
        if self._num_looked_at != num_recorded():
            self._search()
        scaler, self._unseen_factor = self._scaler, None
        if scaler is not None:
            return float(scaler.get_scale()) or 1.0
        if is_half and self._is_ambiguous:
            raise InputError(
                "The model has float16 gradients, and the program has several GradScalers: which one scales the loss? "
                "Say it: AutoVaruna(model, optimizer, scaler=scaler)."
            )
        if not is_half:
            return 1.0
        self._unseen_factor = self._last
        return self._last

    @property
    def has_scaler(self) -> bool:
        """Whether the loop's scaler is known, with which gradients may overflow."""
        return self._scaler is not None

    @property
    def words(self) -> str:
        """The scaler's scale, the same on every rank."""
        scaler = self._scaler
        return "none" if scaler is None else f"{scaler.get_scale():g}"

    @property
    def _scaler(self) -> GradScaler | None:
        """The loop's scaler, which lives as long as the loop keeps it."""
        return None if self._known is None else self._known()

    def record(self, factor: float) -> None:
        """Takes what came into the last backward."""
        self._last = factor

    def _search(self) -> None:
        """Looks for the scaler, since the program has made new ones."""
        self._num_looked_at = num_recorded()
        if self._scaler is not None or self._optimizer is None:
            return
        if enabled_scalers():
            gc.collect()  # one of an earlier run may only wait for this, on one rank longer than on another
        found = enabled_scalers()
        self._known = ref(found[0]) if len(found) == 1 else None
        self._is_ambiguous = len(found) > 1

    def unscale(self, scaler: GradScaler, plain: Callable[[], Overflows], found: Tensor) -> Overflows:
        """Unscales this rank's gradients and returns what overflowed on any rank. Collective.

        Raises:
            InputError: float16 gradients are those of a step that went backward without the scale.
        """
        if self._scaler is None and self._unseen_factor not in (None, scaler.get_scale()):
            raise InputError(
                "A GradScaler unscales float16 gradients that were made without its scale: got one that was not there "
                "when the model was called. Expected it before: make it sooner, or pass it: AutoVaruna(model, "
                "optimizer, scaler=scaler)."
            )
        self._known = ref(scaler)
        own: Overflows = {}
        error: Exception | None = None
        is_over = False
        assert self._optimizer is not None
        try:
            with cut_groups(self._optimizer, OWNERSHIP.own):
                own = plain()
            is_over = any(bool(flag.item()) for flag in own.values())
        except Exception as raised:
            error = raised
        is_over = self._world.is_on_any(is_over, "unscaling gradients", error)
        own = own or {found.device: found}  # a rank without gradients takes part, too
        if is_over:
            for flag in own.values():
                flag.fill_(1.0)
        return own
