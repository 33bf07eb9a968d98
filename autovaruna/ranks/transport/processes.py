"""Defines `ProcessTransport`, the base of transports whose ranks are processes: rings within a host, and their end."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn

from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.interception.ending import status_after
from autovaruna.ranks.transport.base import (
    CHANNELS,
    DONE,
    EAGER_SECONDS,
    TENSOR_CHANNEL,
    Pair,
    Swap,
    TensorTransfer,
    Transport,
    show,
)
from autovaruna.ranks.transport.layout import Layout, split
from autovaruna.ranks.transport.rings import MAX_BYTES, SLOT_BYTES, RingReceiver, RingSender, open_rings

SECOND_HAND_SECONDS = 0.7
LATER_RANK_SECONDS, _MOST_LATER = 0.3, 3
_TAG_BITS = 32
_RING_BYTES = [MAX_BYTES if channel == TENSOR_CHANNEL else SLOT_BYTES for channel in CHANNELS]
"""The largest messages that go through a ring; of sums a rank copies what comes anyway."""


class ProcessTransport(Transport):
    """Ranks that are processes: messages between those of one host may go through rings, others go far."""

    def __init__(self) -> None:
        self._ring_pairs: set[Pair] = set()
        self._rings_to: dict[int, RingSender] = {}
        self._rings_from: dict[int, RingReceiver] = {}
        self.cores_per_rank = 0.0  # until that is known

    @property
    def is_ending(self) -> bool:
        """Whether another rank, which has said why, is ending this one."""
        return False

    @abstractmethod
    def send_far(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        """Starts to send the memory of a dense tensor past the rings."""

    @abstractmethod
    def receive_far(self, tensor: Tensor, source: int, channel: int, tag: int) -> TensorTransfer:
        """Starts to receive into the memory of a dense tensor what comes past the rings."""

    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        ring = self._rings_to.get(destination)
        if ring is not None and tensor.nbytes <= _RING_BYTES[channel]:
            key = channel << _TAG_BITS | tag
            return DONE if ring.put(tensor, key) else ring.queue(tensor, key)
        return self.send_far(tensor, destination, channel, tag)

    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> TensorTransfer:
        ring = self._rings_from.get(source)
        if ring is not None and tensor.nbytes <= _RING_BYTES[channel]:
            return ring.post(tensor, channel << _TAG_BITS | tag)
        return self.receive_far(tensor, source, channel, tag)

    def post_sends(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> list[TensorTransfer]:
        """Starts to send tensors, none of them through a ring if one is too large for it.

        The receive of such a list is posted ahead, past lists that need no post and have the same key: it would get
        their messages for those of its own that come through the ring.
        """
        post = self.send_far if _is_large(tensors, channel) else self.post_send
        return [post(part, destination, channel, tag) for each in tensors for part in split(each)]

    def post_receives(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[TensorTransfer]:
        post = self.receive_far if _is_large(tensors, channel) else self.post_receive
        return [post(part, source, channel, tag) for each in tensors for part in split(each)]

    def open_rings(self, pairs: Iterable[Pair], can_share: bool, swap: Swap) -> None:
        new = set(pairs) - self._ring_pairs
        senders, receivers = open_rings(self.rank, self.hosts, new, can_share, swap)
        self._ring_pairs |= new
        self._rings_to |= senders
        self._rings_from |= receivers

    def is_eager(self, source: int, layouts: Sequence[Layout]) -> bool:
        return source in self._rings_from and all(layout.num_bytes <= MAX_BYTES for layout in layouts)

    def eager_source(self, source: int, tag: int) -> Callable[[Layout], Tensor | None]:
        return partial(self._rings_from[source].borrow, key=TENSOR_CHANNEL << _TAG_BITS | tag)

    def advance(self) -> None:
        for sender in self._rings_to.values():
            sender.advance()
        for receiver in self._rings_from.values():
            receiver.advance()

    def rest(self, waited_seconds: float) -> None:
        """Sleeps once the eager part of a wait is over; where ranks share cores at once, for a fiftieth of it.

        A wait of seconds, as for a plan, becomes longer by a two-thousandth at most: the rank that works has the cores.
        """
        if waited_seconds >= 1.0:
            time.sleep(min(waited_seconds / 2000, 5e-3))
        elif self.cores_per_rank < 1.0:
            time.sleep(min(max(waited_seconds / 50, 20e-6), 500e-6))
        elif waited_seconds >= EAGER_SECONDS:
            time.sleep(50e-6)

    def tell_launcher(self, text: str) -> None:
        """Hands the reason why this rank ends to its launcher, if that takes one."""

    def abort(self, error: BaseException, where: str) -> NoReturn:
        """Ends all ranks with `status_after`, after this rank's traceback.

        Where one rank's error makes others fail, or all fail alike, one message is enough: ranks that only pass on
        another's error, and then later ranks, give the others a moment to end this one first.
        """
        is_second_hand = isinstance(error, RankError) or getattr(error, "is_second_hand", False)
        time.sleep(SECOND_HAND_SECONDS * is_second_hand + LATER_RANK_SECONDS * min(self.rank, _MOST_LATER))
        if not self.is_ending:
            self.tell_launcher(show(error, where))
        self.end(status_after(error))


def _is_large(tensors: Sequence[Tensor], channel: int) -> bool:
    return any(each.nbytes > _RING_BYTES[channel] for each in tensors)
