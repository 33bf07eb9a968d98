"""Defines `ConnectedWorld`: all of `World` on top of a transport that moves single tensors and notices.

A transport fills the methods at the end, which post the sending and receiving of one dense host tensor, and those of
`WatchedWorld`, on which it waits. Everything else is here once: messages, staging, reductions.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autovaruna.runtime.channels.staging import check_dense, empty_on_host, flat, rows_on_host, to_host
from autovaruna.runtime.worlds.message import Message
from autovaruna.runtime.worlds.reduction import GROUP_CHANNEL, Group, broadcast_in_tree
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


class ConnectedWorld(WatchedWorld):
    """Several ranks that exchange messages."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._sends: deque[Pending] = deque()
        self._carrier: TorchChannel | None = None
        self.coming: set[Pending] = set()
        """The messages that are on their way to this rank."""
        self.lagging: set[Pending] = set()
        """Messages on their way, either way, that advance only while this rank calls the transport."""
        self._groups: dict[tuple[int, ...], Group] = {}

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Pending:
        """Starts to send tensors."""
        if len(tensors) == 1 and tensors[0].is_cpu and self._carrier is None:
            return self._send_one(tensors[0], destination, tag)
        if self._carrier is not None and self._carrier.sends_to(destination):
            there = [tensor.detach().to(self._carrier.device) for tensor in tensors]
            return self.post_sends(there, destination, CARRIER_CHANNEL, tag)
        for tensor in tensors:
            if not tensor.is_cpu:
                tensors = [self.reachable(each) for each in tensors]
                break
        return self.post_sends(tensors, destination, TENSOR_CHANNEL, tag)

    def _send_one(self, tensor: Tensor, destination: int, tag: int) -> Pending:
        """Does the same for one tensor on the host: what most messages are, and small stages wait for each line."""
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

    def receive(self, buffers: Sequence[Tensor], source: int, tag: int) -> Pending:
        """Posts the receive of tensors."""
        is_carried = self._carrier is not None and self._carrier.receives_from(source)
        channel = CARRIER_CHANNEL if is_carried else TENSOR_CHANNEL
        posted = [
            buffer if buffer.is_cpu and not is_carried else self._landing(buffer, is_carried) for buffer in buffers
        ]
        if all(map(is_, buffers, posted)):
            return self.post_receives(posted, source, channel, tag)
        staged = [(buffer, other) for buffer, other in zip(buffers, posted, strict=True) if other is not buffer]
        return self.post_receives(posted, source, channel, tag, partial(copy_all, staged))

    def _landing(self, buffer: Tensor, is_carried: bool) -> Tensor:
        """Returns the memory that is received into: that of `buffer` itself, if the way leads to its device."""
        if not is_carried:
            return self.landing(buffer)
        assert self._carrier is not None
        if buffer.device.type == self._carrier.device.type:
            return buffer
        return torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device=self._carrier.device)

    def reachable(self, tensor: Tensor) -> Tensor:
        """Returns a tensor where the transport can send it from: itself, if it is on the host."""
        return to_host(tensor)

    def landing(self, buffer: Tensor) -> Tensor:
        """Returns memory into which the transport can receive what is meant for `buffer`."""
        return buffer if buffer.device.type == "cpu" else empty_on_host(buffer)

    def open_channel(
        self, backend: str, device: torch.device, pairs: Iterable[tuple[int, int]], groups: Iterable[tuple[int, ...]]
    ) -> None:
        """Sends tensors through torch.distributed from now on; a channel that is open is extended. Collective.

        Args:
            backend: ``nccl`` or ``gloo``.
            device: Where this rank's tensors are.
            pairs: (sender, receiver) of messages, over all ranks; others go the old way.
            groups: The ranks of sums.
        """
        from autovaruna.runtime.channels.channel import TorchChannel  # imports torch.distributed

        if self._carrier is None or not self._carrier.is_like(backend, device):
            self._carrier = TorchChannel(self, backend, device)
        self._carrier.connect(pairs, groups)

    def open_rings(self, pairs: Iterable[tuple[int, int]], has_host_memory: bool) -> None:
        """Sends messages between ranks of one host a shorter way from now on, if this transport has one. Collective.

        Args:
            pairs: (sender, receiver), the same on every rank.
            has_host_memory: Whether all that this rank sends and receives lies in the host's memory.
        """

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
        if len(tensors) == 1 and tensors[0].nbytes <= MAX_PART_BYTES:
            check_dense(tensors[0])
            return [self.post_send(tensors[0], destination, channel, tag)]
        return [self.post_send(part, destination, channel, tag) for each in tensors for part in split(each)]

    def receive_parts(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[Pending]:
        """Posts the receives of the same parts."""
        if channel == CARRIER_CHANNEL and self._carrier is not None:
            return [self._carrier.post_receive(part, source, tag) for each in tensors for part in split(each)]
        if len(tensors) == 1 and tensors[0].nbytes <= MAX_PART_BYTES:
            check_dense(tensors[0])
            return [self.post_receive(tensors[0], source, channel, tag)]
        return [self.post_receive(part, source, channel, tag) for each in tensors for part in split(each)]

    # Groups of ranks.

    def broadcast(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> None:
        """Overwrites `tensor` with that of rank `root`, on `ranks`."""
        assert root in ranks, f"root {root} must be among ranks {ranks}"
        host = rows_on_host(tensor)
        broadcast_in_tree(self._group(ranks), host, root)
        if host is not tensor and self.rank != root:
            tensor.detach().copy_(host)

    def start_all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Starts to overwrite `tensor` with its sum over `ranks`."""
        check_dense(tensor)
        if len(ranks) == 1 or tensor.numel() == 0:
            return DONE
        if self._carrier is not None and tensor.device.type == self._carrier.device.type:
            carried = self._carrier.start_all_reduce(tensor, ranks)
            if carried is not None:
                return carried
        return self._group(ranks).start(tensor)

    def _group(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self._groups:
            assert self.rank in ranks, f"rank {self.rank} must be among {ranks}"
            group = Group(self, ranks)
            assert all(known.tag != group.tag for known in self._groups.values()), f"tag {group.tag} is taken"
            self._groups[ranks] = group
        return self._groups[ranks]

    # Progress.

    def progress(self) -> None:
        """Lets messages and reductions advance; forgets finished sends."""
        if self._sends:
            self._forget_sends()
        if self._carrier is not None:
            self._carrier.advance()
        self.advance()
        self.listen()
        self.raise_failure()

    def glance(self) -> None:
        """Lets messages that need it, and reductions, advance; small messages do so by themselves."""
        if len(self._sends) > SENDS_AT_ONCE or self._carrier is not None:
            self.progress()
            return
        for message in list(self.lagging):
            if not message.is_done():  # to ask for one lets all advance
                break
        for group in self._groups.values():
            if group.active:
                self.progress()
                return

    def flush(self) -> None:
        """Blocks until everything that this rank sent has left it."""
        for group in self._groups.values():
            self.wait_until(group.is_idle, group.waiting)
        while self._sends:
            self._sends.popleft().wait()

    def _forget_sends(self) -> None:
        """Forgets finished sends, looking at some of them in turn: thousands may be on their way."""
        for _ in range(min(len(self._sends), SENDS_AT_ONCE)):
            message = self._sends.popleft()
            if not message.is_done():
                self._sends.append(message)

    def advance(self) -> None:
        """Lets reductions advance."""
        for group in self._groups.values():
            group.is_idle()

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


def copy_all(staged: list[tuple[Tensor, Tensor]]) -> None:
    """Copies each pair's second tensor to its first."""
    with torch.no_grad():
        for tensor, host in staged:
            tensor.copy_(host)
