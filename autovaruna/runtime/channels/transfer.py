"""What is on its way through torch.distributed: a tensor between two ranks, or a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.channels.staging import flat
from autovaruna.runtime.transport.base import Part, Pending

if TYPE_CHECKING:
    from autovaruna.runtime.channels.channel import TorchChannel


class Transfer(Part):
    """One tensor on its way; `work` is there once it has been started."""

    def __init__(self, channel: TorchChannel, tensor: Tensor, *, is_send: bool) -> None:
        self.tensor = tensor
        self.work: Any = None
        self.spare: Tensor | None = None
        self._channel = channel
        self._is_send = is_send

    def is_done(self) -> bool:
        """Says whether it may be used: on a GPU a receive may as soon as the stream waits for it."""
        if self.work is None:
            self._channel.advance()
        if self.work is None or not self._is_finished():
            return False
        if self.spare is not None:
            self._take_spare(self.spare)
        return True

    def _take_spare(self, spare: Tensor) -> None:
        if spare.numel() != self.tensor.nbytes:
            raise RankError(f"a rank sent {spare.numel()} bytes where {self.tensor.nbytes} were expected")
        flat(self.tensor).view(torch.uint8).copy_(spare)
        self.spare = None

    def _is_finished(self) -> bool:
        if self._channel.is_on_host:
            return bool(self.work.done())
        if self._is_send:
            return bool(self.work.is_completed())
        self.work.wait()
        return True


class Sum(Pending):
    """A sum over a group on its way."""

    def __init__(self, channel: TorchChannel, work: Any, tensor: Tensor, result: Tensor) -> None:
        self._channel = channel
        self._work = work
        self._tensor = tensor
        self._result = result

    def is_done(self) -> bool:
        """Says whether it has finished."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Waits: the host with gloo, the stream on a GPU."""
        if self._channel.is_on_host:
            self._channel.world.watch.wait_until(self.is_done, lambda: ("for a sum over torch.distributed", ()))
        self._work.wait()
        if self._result is not self._tensor:
            self._tensor.copy_(self._result)


class Nothing:
    """Work on a tensor without elements: done."""

    def done(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True
