"""Defines `SocketTransport`: ranks that a launcher of torch.distributed started (torchrun, accelerate), over TCP.

store    where the launcher says (MASTER_ADDR); ranks find each other's addresses there, and a secret
data     one connection for each pair of ranks; a message is a header and its bytes, in the order sent
life     one connection of each rank with rank 0; a thread of each hears there that a rank has ended, and ends all
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import c_char
from datetime import timedelta
from hmac import compare_digest
from pathlib import Path
from secrets import token_bytes
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from autovaruna.errors import RankError
from autovaruna.log import write_error
from autovaruna.runtime.transport.base import DONE, SMALL_BYTES, Arrival, Departure, TensorTransfer
from autovaruna.runtime.transport.processes import ProcessTransport

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<IIQ")
"""Channel, tag, number of bytes."""
_NOTICE_CHANNEL = 1 << 16
_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI?")
"""The secret of the job, the rank that connects, and whether the connection is for data."""
_GREETING_SECONDS = 10.0
_START_SECONDS, _REPORT_SECONDS = 1800.0, 30.0
"""How long ranks wait for those that have not come to their first call, and after what time they say so."""
_CHECK_SECONDS = 1.0
_AT_ONCE = 64
"""Buffers that one call of the system takes."""
_GOODBYE, _END = b"b", b"e"
_LAUNCHER_SECONDS = 1.0
"""What the launcher has to note which rank failed first, before others end."""

Key = tuple[int, int]
"""Channel and tag."""


class Peer:
    """The connection with a rank, never blocking; `outgoing` is not `incoming` where that is this rank itself."""

    def __init__(self, outgoing: socket.socket, incoming: socket.socket) -> None:
        outgoing.setblocking(False)
        incoming.setblocking(False)
        self.outgoing, self.incoming = outgoing, incoming
        self.posted: defaultdict[Key, deque[Arrival]] = defaultdict(deque)
        self.early: defaultdict[Key, deque[bytearray]] = defaultdict(deque)
        self.notices: deque[bytearray] = deque()
        self._out: deque[memoryview] = deque()
        self._leaving: deque[tuple[int, Departure]] = deque()  # what has left once so many bytes have
        self._num_out = self._num_left = 0
        self._header = bytearray(_HEADER.size)
        self._into = memoryview(self._header)
        self._body: bytearray | Arrival | None = None
        self._is_open = True

    @property
    def is_quiet(self) -> bool:
        """Whether all has left; nothing goes to a rank that has ended."""
        return not self._out or not self._is_open

    def send(self, key: Key, memory: memoryview, departure: Departure) -> None:
        """Sends a message, as far as there is room; the rest with later calls of `advance`."""
        self._out.append(memoryview(_HEADER.pack(*key, len(memory))))
        if len(memory):
            self._out.append(memory)
        self._num_out += _HEADER.size + len(memory)
        self._leaving.append((self._num_out, departure))
        self.push()

    def push(self) -> None:
        while self._out and self._is_open:
            try:
                num_sent = self.outgoing.sendmsg([self._out[i] for i in range(min(_AT_ONCE, len(self._out)))])
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # the other rank has ended, which its other connection tells
                self._is_open = False
                break
            self._num_left += num_sent
            while num_sent:
                if num_sent < len(self._out[0]):
                    self._out[0] = self._out[0][num_sent:]
                    break
                num_sent -= len(self._out.popleft())
        while self._leaving and self._leaving[0][0] <= self._num_left:
            self._leaving.popleft()[1].has_left = True

    def pull(self) -> None:
        while self._is_open:
            try:
                num_bytes = self.incoming.recv_into(self._into)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                num_bytes = 0
            if num_bytes == 0:
                self._is_open = False
                return
            self._into = self._into[num_bytes:]
            if not len(self._into):
                self._end_part()

    def _end_part(self) -> None:
        """Goes on from a whole header to its message, or delivers a whole message."""
        channel, tag, size = _HEADER.unpack(self._header)
        if self._body is None:
            posted = self.posted[channel, tag]
            if channel != _NOTICE_CHANNEL and posted and posted[0].tensor.nbytes == size:
                self._body = posted.popleft()
                self._into = memory_of(self._body.tensor)
            else:
                self._body = bytearray(size)
                self._into = memoryview(self._body)
            if size:
                return
        body, self._body, self._into = self._body, None, memoryview(self._header)
        if isinstance(body, Arrival):
            body.has_come(size)
        elif channel == _NOTICE_CHANNEL:
            self.notices.append(body)
        elif self.posted[channel, tag]:
            _fill(self.posted[channel, tag].popleft(), body)
        else:
            self.early[channel, tag].append(body)


class SocketTransport(ProcessTransport):
    """The ranks of a launcher of torch.distributed, which all see a store, for this start of them alone.

    `check` raises if ranks have ended that would have to come.
    """

    def __init__(
        self, store: Any, rank: int, num_ranks: int, master: tuple[str, int], check: Callable[[], None]
    ) -> None:
        super().__init__()
        self.rank = rank
        if rank == 0:
            store.set("token", token_bytes(_TOKEN_BYTES).hex())
        family, own = own_address(master)
        with socket.create_server((own, 0), family=family, backlog=2 * num_ranks) as server:
            host, port = server.getsockname()[:2]
            store.set(f"rank {rank}", f"{socket.gethostname()} {host} {port}")
            await_ranks(store, num_ranks, check)
            token = bytes.fromhex(store.get("token").decode())
            places = [store.get(f"rank {other}").decode().split() for other in range(num_ranks)]
            self.hosts = tuple(name for name, _, _ in places)
            found = {(other, True): _call(places[other], (token, rank, True)) for other in range(rank)}
            if rank:
                found[0, False] = _call(places[0], (token, rank, False))
            expected = {(other, True) for other in range(rank + 1, num_ranks)}
            expected |= {(other, False) for other in range(1, num_ranks)} if rank == 0 else set()
            found |= _answer(server, token, expected)
        self._peers = {other: Peer(each, each) for (other, is_data), each in found.items() if is_data}
        self._peers[rank] = Peer(*socket.socketpair())
        self._life = Life(rank, {other: each for (other, is_data), each in found.items() if not is_data})
        os.register_at_fork(after_in_child=self._forget)

    # Messages.

    def send_far(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        departure = Departure(self, tensor)
        self._peers[destination].send((channel, tag), memory_of(tensor), departure)
        return DONE if departure.has_left else departure

    def receive_far(self, tensor: Tensor, source: int, channel: int, tag: int) -> TensorTransfer:
        arrival = Arrival(self, source, tensor, needs_calls=tensor.nbytes > SMALL_BYTES)
        peer = self._peers[source]
        if early := peer.early.get((channel, tag)):
            _fill(arrival, early.popleft())
        else:
            peer.posted[channel, tag].append(arrival)
        return arrival

    def advance(self) -> None:
        super().advance()
        for peer in self._peers.values():
            peer.push()
            peer.pull()

    # Notices.

    def send_notice(self, data: bytes, destination: int) -> None:
        self._peers[destination].send((_NOTICE_CHANNEL, 0), memoryview(data), Departure(self, None))

    def are_notices_out(self) -> bool:
        for peer in self._peers.values():
            peer.push()
        return all(peer.is_quiet for peer in self._peers.values())

    def poll_notices(self) -> Iterator[tuple[int, bytearray]]:
        for source, peer in self._peers.items():
            peer.push()
            peer.pull()
            while peer.notices:
                yield source, peer.notices.popleft()

    # The end.

    @property
    def is_ending(self) -> bool:
        return self._life.is_ending

    def tell_launcher(self, text: str) -> None:
        """Hands the reason to torchrun, whose last words then are of the rank that failed first, and have it."""
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file:
            with suppress(OSError):
                Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))

    def end(self, status: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        self._life.tell(_END + bytes([status & 0xFF]))
        os._exit(status)

    def close(self) -> None:
        self._life.tell(_GOODBYE)

    def _forget(self) -> None:
        """Closes what a child process has inherited: its parent's end must show."""
        for connection in [*(peer.outgoing for peer in self._peers.values()), *self._life.connections.values()]:
            connection.close()


class Life:
    """Ends this rank with the others, whatever it does, in a thread of its own.

    Its connections are with rank 0, or, on it, with all others.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self._rank, self.connections = rank, connections
        self.is_ending = False
        self._selector = selectors.DefaultSelector()
        for other, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, other)
        threading.Thread(target=self._listen, name="autovaruna-life", daemon=True).start()

    def tell(self, word: bytes) -> None:
        """Tells the others that this rank may end, or that they are to end with it."""
        for connection in self.connections.values():
            with suppress(OSError):  # it has ended
                connection.sendall(word)

    def _listen(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                word = b""
                with suppress(OSError):
                    word = self.connections[key.data].recv(2)
                if word[:1] == _GOODBYE:
                    self._selector.unregister(key.fileobj)
                else:
                    self._end_with(key.data, word)

    def _end_with(self, other: int, word: bytes) -> None:
        """Ends this rank, and on rank 0 all others, since one has ended; says so if that one could not."""
        self.is_ending = True
        status = word[1] if word[:1] == _END and len(word) > 1 else 1
        if self._rank == 0:
            self.tell(_END + bytes([status]))
        if not word and self._rank <= 1:
            write_error(f"rank {other} has ended without a word: it was killed, or has no memory left.\n")
        time.sleep(_LAUNCHER_SECONDS)
        os._exit(status)


def open_store() -> Any:
    """Returns the store of this start of the ranks, where their launcher says; the script may use the same."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_START_SECONDS)))
    return PrefixStore("autovaruna", store)


def _fill(arrival: Arrival, data: bytearray) -> None:
    """Gives a message that has come, of whatever size, to the receive that was posted for it."""
    if len(data) == arrival.tensor.nbytes:
        memory_of(arrival.tensor)[:] = data
    arrival.has_come(len(data))


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a dense tensor as bytes."""
    return memoryview((c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def own_address(master: tuple[str, int]) -> tuple[socket.AddressFamily, str]:
    """Returns the address by which other ranks reach this host: the one that this host reaches the store from."""
    host, port = master
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return family, str(probe.getsockname()[0])


def await_ranks(store: Any, num_ranks: int, check: Callable[[], None]) -> None:
    """Returns once every rank has come; raises a `RankError` if one has not, for half an hour."""
    began, has_told, checked = time.monotonic(), False, 0.0
    while missing := [rank for rank in range(num_ranks) if not store.check([f"rank {rank}"])]:
        waited = time.monotonic() - began
        if waited > _START_SECONDS:
            raise RankError(f"ranks {missing} have not come to their first call within {_START_SECONDS:.0f} s.")
        if waited > _REPORT_SECONDS and not has_told:
            has_told = True
            logger.warning("ranks %s have not come to their first call for %.0f s", missing, waited)
        if waited > checked + _CHECK_SECONDS:
            checked = waited
            check()
        time.sleep(0.01 if waited < 1 else 0.1)


def _call(place: list[str], greeting: tuple[bytes, int, bool]) -> socket.socket:
    _, host, port = place
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_GREETING.pack(*greeting))
    return connection


def _answer(
    server: socket.socket, token: bytes, expected: set[tuple[int, bool]]
) -> dict[tuple[int, bool], socket.socket]:
    """Accepts the connections of other ranks; those of strangers, who do not know the secret, are closed."""
    found: dict[tuple[int, bool], socket.socket] = {}
    while expected - found.keys():
        connection, _ = server.accept()
        connection.settimeout(_GREETING_SECONDS)
        given, rank, is_data = b"", -1, False
        with suppress(OSError, struct.error):
            given, rank, is_data = _GREETING.unpack(connection.recv(_GREETING.size, socket.MSG_WAITALL))
        if not compare_digest(given, token) or (rank, is_data) not in expected:
            connection.close()
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found[rank, is_data] = connection
    return found
