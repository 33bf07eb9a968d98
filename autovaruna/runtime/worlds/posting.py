"""Defines `PostingWorld`: a world that posts the tensors of messages, each in parts of at most 1 GiB.

A transport fills the two methods at the end, which post the sending and receiving of one dense host tensor, and those
of `WatchedWorld`, on which it waits.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autovaruna.runtime.channels.staging import check_dense, flat
from autovaruna.runtime.worlds.message import Message
from autovaruna.runtime.worlds.reduction import GROUP_CHANNEL
from autovaruna.runtime.worlds.watched import WatchedWorld
from autovaruna.runtime.worlds.world import DONE, Pending

if TYPE_CHECKING:
    from autovaruna.runtime.channels.channel import TorchChannel

TENSOR_CHANNEL = 0
OBJECT_CHANNEL = 1
HEADER_CHANNEL = 3
CARRIER_CHANNEL = 4
"""Not of the transport: tensors that `TorchChannel` carries."""
CHANNELS = (TENSOR_CHANNEL, OBJECT_CHANNEL, GROUP_CHANNEL, HEADER_CHANNEL)
MAX_PART_BYTES = 1 << 30
SENDS_AT_ONCE = 16


class PostingWorld(WatchedWorld):
    """Several ranks that post sends and receives of host tensors, and of objects as such."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._sends: deque[Pending] = deque()
        self._carrier: TorchChannel | None = None
        self.coming: set[Pending] = set()
        """The messages that are on their way to this rank."""
        self.lagging: set[Pending] = set()
        """Messages on their way, either way, that advance only while this rank calls the transport."""

    def post_sends(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> Pending:
        """Starts to send host tensors."""
        parts = self.send_parts(tensors, destination, channel, tag)
        event = "sent", destination, channel, tag
        count = self.count(event, len(parts))
        if parts.count(DONE) == len(parts):
            return DONE
        message = Message(self, parts, event, count)
        self._sends.append(message)
        return message

    def post_one_send(self, tensor: Tensor, destination: int, tag: int) -> Pending:
        """Does the same for a message of one tensor: what most are, and small stages wait for each line."""
        if tensor.nbytes > MAX_PART_BYTES:
            return self.post_sends([tensor], destination, TENSOR_CHANNEL, tag)
        check_dense(tensor)
        part = self.post_send(tensor, destination, TENSOR_CHANNEL, tag)
        event = "sent", destination, TENSOR_CHANNEL, tag
        count = self._counts[event] = self._counts[event] + 1
        if part is DONE:
            return DONE
        message = Message(self, [part], event, count)
        self._sends.append(message)
        return message

    def post_receives(
        self,
        buffers: Sequence[Tensor],
        source: int,
        channel: int,
        tag: int,
        finish: Callable[[], None] | None = None,
    ) -> Message:
        """Posts the receive of host tensors; `finish` runs when they have arrived."""
        parts = self.receive_parts(buffers, source, channel, tag)
        event = "received", source, channel, tag
        message = Message(self, parts, event, self.count(event, len(parts)), finish)
        self.coming.add(message)
        return message

    def send_parts(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> list[Pending]:
        """Starts to send host tensors, each in parts of at most 1 GiB."""
        if channel == CARRIER_CHANNEL and self._carrier is not None:
            return [self._carrier.post_send(part, destination, tag) for each in tensors for part in split(each)]
        return [self.post_send(part, destination, channel, tag) for each in tensors for part in split(each)]

    def receive_parts(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[Pending]:
        """Posts the receives of the same parts."""
        if channel == CARRIER_CHANNEL and self._carrier is not None:
            return [self._carrier.post_receive(part, source, tag) for each in tensors for part in split(each)]
        return [self.post_receive(part, source, channel, tag) for each in tensors for part in split(each)]

    def keep(self, pending: Pending) -> None:
        """Keeps what is on its way until it has left."""
        self._sends.append(pending)

    def send_object(self, value: object, destination: int, tag: int) -> Pending:
        """Starts to send an object, as its length and its pickle."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return self.post_sends([torch.tensor([data.numel()], device="cpu"), data], destination, OBJECT_CHANNEL, tag)

    def receive_object(self, source: int, tag: int) -> Any:
        """Returns the next object that `source` sent with `tag`."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self.post_receives([length], source, OBJECT_CHANNEL, tag).wait()
        data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
        self.post_receives([data], source, OBJECT_CHANNEL, tag).wait()
        return pickle.loads(data.numpy().tobytes())

    def _forget_sends(self) -> None:
        """Forgets finished sends, looking at some of them in turn: thousands may be on their way."""
        for _ in range(min(len(self._sends), SENDS_AT_ONCE)):
            message = self._sends.popleft()
            if not message.is_done():
                self._sends.append(message)

    # The transport.

    @abstractmethod
    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Pending:
        """Starts to send the memory of a dense host tensor."""

    @abstractmethod
    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> Pending:
        """Starts to receive into the memory of a dense host tensor."""


def split(tensor: Tensor) -> list[Tensor]:
    """Returns a dense tensor as pieces of at most 1 GiB that share its memory: as a rule itself."""
    check_dense(tensor)
    if tensor.nbytes <= MAX_PART_BYTES:
        return [tensor]
    return list(torch.split(flat(tensor), MAX_PART_BYTES // tensor.element_size()))
