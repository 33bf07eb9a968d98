"""Defines `Metrics`: the last step of a model that went backward."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from torch import Tensor

logger = logging.getLogger(__name__)


class Metrics:
    """The last step of a model that went backward, as this rank knows it.

    Attributes:
        step: the number of its call, from 1 on; 0: there was none.
        work_seconds: what this rank's stages have computed for, in all calls so far; without waits for other ranks.
    """

    def __init__(self) -> None:
        self.step, self.work_seconds = 0, 0.0
        self._number: Tensor | None = None
        self._value: float | None = None
        self._where: Callable[[], str] = str
        self._is_loss = self._has_told = False

    @property
    def loss(self) -> float | None:
        """The loss of the global batch; None where the script computes it."""
        return self._settled() if self._is_loss else None

    @property
    def is_finite(self) -> bool | None:
        """Whether the loss is, or the gradient that came from a loss of the script's own; None: it is not known."""
        value = self._settled()
        return None if value is None else math.isfinite(value)

    def note(self, step: int, number: Tensor | None, where: Callable[[], str], *, is_loss: bool) -> None:
        """Takes a step, by the number of its call.

        Args:
            number: The loss, or what is finite if its gradient is; None: nothing is known. A GPU computes it while the
                script goes on: it is looked at when it is asked for, or in the next step.
            where: Says where it was found, in words; empty: not on this rank.
        """
        self._settled()
        self.step, self._number, self._is_loss, self._where, self._value = step, number, is_loss, where, None
        if number is not None and number.is_cpu:
            self._settled()

    def _settled(self) -> float | None:
        if self._number is not None:
            self._value, self._number = float(self._number.item()), None
            if not math.isfinite(self._value) and not self._has_told and (words := self._where()):
                self._has_told = True
                logger.warning(
                    "step %d: %s; told once, model.metrics.is_finite says it of every step", self.step, words
                )
            self._where = str  # lets the step go
        return self._value
