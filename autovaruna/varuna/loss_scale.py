"""Scales the loss of a float16 step, and lets the scale follow what overflows, alike on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autovaruna._torch import foreach_mul_
from autovaruna.errors import InputError

GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale doubles."""


class StepScale:
    """The scale of the loss: fixed, or halved by an overflow and doubled after many steps without one.

    Attributes:
        scaler: holds the scale, for whoever goes backward or writes a checkpoint.

    Args:
        device: Where the loss is.
    """

    def __init__(self, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type, growth_interval=GROWTH_INTERVAL)
        self._is_dynamic = True
        self._least = 1.0

    def configure(self, loss_scale: float | str, init_scale: float, min_scale: float) -> None:
        """Sets the scale.

        Args:
            loss_scale: A number, or ``dynamic``.
            init_scale: The first one of a dynamic scale.
            min_scale: The least one of a dynamic scale.

        Raises:
            InputError: a number is not above zero, or `loss_scale` is another word.
        """
        self._is_dynamic = loss_scale == "dynamic"
        if not self._is_dynamic and (isinstance(loss_scale, str | bool) or not isinstance(loss_scale, int | float)):
            raise InputError(f"loss_scale is {loss_scale!r}; expected a number, or 'dynamic'.")
        first = init_scale if self._is_dynamic else float(loss_scale)
        if not (first > 0 and min_scale > 0):
            raise InputError(f"A loss scale is above zero: got {first!r}, at least {min_scale!r}.")
        self._least = float(min_scale)
        self._set(float(first), 0)

    @property
    def value(self) -> float:
        """The scale."""
        return float(self.scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        return loss * self.value

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides the gradients of this rank by the scale; infinite ones and NaN stay what they are."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            foreach_mul_(gradients, 1.0 / self.value)

    def update(self, has_overflow: bool) -> None:
        """Follows a step, with what all ranks have found together."""
        if not self._is_dynamic:
            return
        num_good = 0 if has_overflow else self.scaler.state_dict()["_growth_tracker"] + 1
        if has_overflow:
            self._set(max(self.value / 2, self._least), 0)
        elif num_good >= GROWTH_INTERVAL:
            self._set(self.value * 2, 0)
        else:
            self._set(self.value, num_good)

    def _set(self, scale: float, num_good: int) -> None:
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": num_good})
