"""Defines `Lent`: what a script writes into a state that it was given reaches the model, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor


class Lent:
    """Copies of parameters and buffers that a script was given, in which it may write.

    They are kept until `settle`, so that writes into a state that the script has dropped count, too; and followed from
    then on for as long as the script keeps them.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._known: list[tuple[Callable[[], Tensor | None], int, Tensor]] = []

    def lend(self, given: Tensor, own: Tensor) -> None:
        """Notes that a script was given a copy of a tensor."""
        self._kept.append(given)
        self._known.append((ref(given), given._version, own))

    def settle(self, *_: object) -> None:
        """Copies what has been written since into the model; a hook of the optimizer, too."""
        if not self._known:
            return
        known, self._known = self._known, []
        with torch.no_grad():
            for find, version, own in known:
                if (given := find()) is None:
                    continue
                if given._version != version:
                    own.copy_(given)
                self._known.append((find, given._version, own))
        given = None
        self._kept.clear()
