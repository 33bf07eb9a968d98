"""Makes the links between ranks slower than they are, to try out on one host what a plan does on several."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from autovaruna.ranks.transport.base import Pending
from autovaruna.ranks.world import World


class Delayed(Pending):
    """A message that comes a while after it was sent."""

    def __init__(self, world: World, pending: Pending, sent: Tensor, latency_seconds: float) -> None:
        self._world = world
        self._pending = pending
        self._sent = sent
        self._latency_seconds = latency_seconds

    def is_done(self) -> bool:
        """Says whether it has come."""
        return self._pending.is_done() and self._rest_seconds() <= 0

    def wait(self) -> None:
        """Blocks until it has come."""
        self._pending.wait()
        while (rest := self._rest_seconds()) > 0:
            time.sleep(min(rest, 1e-3))
            self._world.progress()

    def _rest_seconds(self) -> float:
        return float(self._sent.item()) + self._latency_seconds - time.monotonic()


def delay_messages(world: World, latency_seconds: float) -> None:
    """Delays each message of tensors that this rank receives; all ranks must be on one host, whose clock they share.

    Sums over groups and objects stay as they are. Every rank must call this before the first message.
    """
    send, receive = world.send, world.receive

    def send_stamped(tensors: Sequence[Tensor], destination: int, tag: int) -> Pending:
        return send([_stamp(time.monotonic()), *tensors], destination, tag)

    def receive_delayed(buffers: Sequence[Tensor], source: int, tag: int) -> Pending:
        sent = _stamp(0.0)
        return Delayed(world, receive([sent, *buffers], source, tag), sent, latency_seconds)

    world.is_eager = lambda *_: False  # type: ignore[method-assign]
    world.send = send_stamped  # type: ignore[method-assign]
    world.receive = receive_delayed  # type: ignore[method-assign]


def _stamp(seconds: float) -> Tensor:
    return torch.tensor(seconds, dtype=torch.float64, device="cpu")
