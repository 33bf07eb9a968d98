"""Defines `ConnectedWorld`: all of `World` on top of a transport that moves single tensors and notices.

A transport fills the abstract methods of `PostingWorld` and `WatchedWorld`. Here is which way a tensor takes: from the
device or staged on the host, through torch.distributed; and what groups of ranks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor

from autovaruna.runtime.channels.staging import check_dense, empty_on_host, rows_on_host, to_host
from autovaruna.runtime.worlds.posting import CARRIER_CHANNEL, SENDS_AT_ONCE, TENSOR_CHANNEL, PostingWorld
from autovaruna.runtime.worlds.reduction import Group, broadcast_in_tree
from autovaruna.runtime.worlds.world import DONE, Pending


class ConnectedWorld(PostingWorld):
    """Several ranks that exchange messages."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._groups: dict[tuple[int, ...], Group] = {}

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Pending:
        """Starts to send tensors."""
        if len(tensors) == 1 and tensors[0].is_cpu and self._carrier is None:
            return self.post_one_send(tensors[0], destination, tag)
        if self._carrier is not None and self._carrier.sends_to(destination):
            there = [tensor.detach().to(self._carrier.device) for tensor in tensors]
            return self.post_sends(there, destination, CARRIER_CHANNEL, tag)
        for tensor in tensors:
            if not tensor.is_cpu:
                tensors = [self.reachable(each) for each in tensors]
                break
        return self.post_sends(tensors, destination, TENSOR_CHANNEL, tag)

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

    def advance(self) -> None:
        """Lets reductions advance."""
        for group in self._groups.values():
            group.is_idle()


def copy_all(staged: list[tuple[Tensor, Tensor]]) -> None:
    """Copies each pair's second tensor to its first."""
    with torch.no_grad():
        for tensor, host in staged:
            tensor.copy_(host)
