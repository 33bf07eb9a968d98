"""Defines `ThreadTransport`, of ranks that are threads of one process, and `SingleTransport`, of the only rank."""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from autovaruna.interception.ending import status_after
from autovaruna.ranks.transport.base import DONE, SMALL_BYTES, TensorTransfer, Transport, check_size, show
from autovaruna.ranks.transport.layout import flat

Address = tuple[int, int, int, int]
"""Source, destination, channel, tag."""


class Mailboxes:
    """What the ranks share: messages and notices on the way."""

    def __init__(self, num_ranks: int) -> None:
        self.messages: dict[tuple[Address, int], Tensor] = {}
        self.notices: list[deque[tuple[int, bytes]]] = [deque() for _ in range(num_ranks)]


class Delivery(TensorTransfer):
    """The n-th receive from an address, which takes the n-th message sent to it."""

    def __init__(self, mailboxes: Mailboxes, key: tuple[Address, int], buffer: Tensor) -> None:
        self._mailboxes, self._key, self._buffer = mailboxes, key, buffer
        self.needs_calls = buffer.nbytes > SMALL_BYTES

    def is_done(self) -> bool:
        data = self._mailboxes.messages.pop(self._key, None)
        if data is None:
            return False
        buffer = flat(self._buffer).view(torch.uint8)
        check_size(self._key[0][0], data.numel(), buffer.numel())
        buffer.copy_(data)
        return True


class ThreadTransport(Transport):
    """One rank of several in one process; how its errors end the others is for whoever starts them to say."""

    def __init__(self, rank: int, mailboxes: Mailboxes) -> None:
        self.rank = rank
        self.hosts = (socket.gethostname(),) * len(mailboxes.notices)
        self._mailboxes = mailboxes
        self._num_sent: Counter[Address] = Counter()
        self._num_received: Counter[Address] = Counter()

    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        address = self.rank, destination, channel, tag
        self._mailboxes.messages[address, self._num_sent[address]] = flat(tensor).view(torch.uint8).clone()
        self._num_sent[address] += 1
        return DONE

    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> TensorTransfer:
        address = source, self.rank, channel, tag
        number = self._num_received[address]
        self._num_received[address] += 1
        return Delivery(self._mailboxes, (address, number), tensor)

    def send_notice(self, data: bytes, destination: int) -> None:
        self._mailboxes.notices[destination].append((self.rank, data))

    def poll_notices(self) -> Iterator[tuple[int, bytes]]:
        notices = self._mailboxes.notices[self.rank]
        while notices:
            yield notices.popleft()

    def rest(self, waited_seconds: float) -> None:
        """Lets the other threads run; a long wait becomes longer by a fiftieth at most."""
        time.sleep(0.0 if waited_seconds < 1e-3 else min(100e-6 + waited_seconds / 50, 3e-3))


class SingleTransport(ThreadTransport):
    """The only rank of a process without mpirun. It starts no MPI; messages to itself work as everywhere."""

    def __init__(self) -> None:
        super().__init__(0, Mailboxes(1))

    def abort(self, error: BaseException, where: str) -> NoReturn:
        """Prints the traceback, headed by `where`, and ends the program with `status_after`."""
        show(error, where)
        self.end(status_after(error))
