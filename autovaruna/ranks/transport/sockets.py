"""Defines `SocketTransport`: ranks that a launcher of torch.distributed started (torchrun, accelerate), over TCP.

store    where the launcher says (MASTER_ADDR); ranks find each other's addresses there, and a secret
data     a connection for each direction of a pair of ranks, opened by its first message; a message is a header and its
         bytes, in the order sent
life     a tree: one connection of each rank with the one above it; a thread of each hears there that a rank has ended,
         passes it on, and ends its own
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
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
from functools import partial
from hmac import compare_digest
from itertools import islice
from pathlib import Path
from secrets import token_bytes
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from autovaruna.errors import RankError
from autovaruna.interception.ending import end_now
from autovaruna.log import write_error
from autovaruna.ranks.transport.base import DONE, SMALL_BYTES, Arrival, Departure, TensorTransfer
from autovaruna.ranks.transport.processes import ProcessTransport

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<IIQ")
"""Channel, tag, number of bytes."""
_NOTICE_CHANNEL = 1 << 16
_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI?")
"""The secret of the job, the rank that connects, and whether the connection is for data."""
_START_SECONDS, _REPORT_SECONDS = 1800.0, 30.0
"""How long ranks wait for those that have not come to their first call, and after what time they say so."""
_CHECK_SECONDS = 1.0
_BRANCHES = 8
"""Ranks right below one in the tree of lives."""
_AT_ONCE = 64
"""Buffers that one call of the system takes."""
_GOODBYE, _END = b"b", b"e"
_LAUNCHER_SECONDS = 1.0
"""What the launcher has to note which rank failed first, before others end."""

Key = tuple[int, int]
"""Channel and tag."""


class Peer:
    """The connections with a rank: one to it, made by `connect` at the first message, and one from it; never blocking.

    Its notices go to `notices`.
    """

    def __init__(
        self, rank: int, connect: Callable[[int], socket.socket], notices: deque[tuple[int, bytearray]]
    ) -> None:
        self._rank, self._connect, self._notices = rank, connect, notices
        self.outgoing: socket.socket | None = None
        self.incoming: socket.socket | None = None
        self.posted: defaultdict[Key, deque[Arrival]] = defaultdict(deque)
        self.early: defaultdict[Key, deque[bytearray]] = defaultdict(deque)
        self._out: deque[tuple[memoryview, Departure | None]] = deque()  # None: more of the same message follows
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
        self._out.append((memoryview(_HEADER.pack(*key, len(memory))), None if len(memory) else departure))
        if len(memory):
            self._out.append((memory, departure))
        self.push()

    def push(self) -> None:
        while self._out and self._is_open:
            try:
                self.outgoing = self.outgoing or self._connect(self._rank)
                num_sent = self.outgoing.sendmsg([buffer for buffer, _ in islice(self._out, _AT_ONCE)])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # the other rank has ended, which the tree of lives tells
                refuse_descriptors(error)
                self._is_open = False
                break
            while num_sent:
                buffer, departure = self._out.popleft()
                if num_sent < len(buffer):
                    self._out.appendleft((buffer[num_sent:], departure))
                elif departure is not None:
                    departure.has_left = True
                num_sent = max(0, num_sent - len(buffer))

    def pull(self) -> bool:
        """Takes what has come; returns whether more may come."""
        while self.incoming is not None:
            try:
                num_bytes = self.incoming.recv_into(self._into)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                num_bytes = 0
            if num_bytes == 0:
                self.incoming, self._is_open = None, False
                return False
            self._into = self._into[num_bytes:]
            if not len(self._into):
                self._end_part()
        return False

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
            self._notices.append((self._rank, body))
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
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((own, 0), family=family, backlog=2 * num_ranks)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        host, port = self._server.getsockname()[:2]
        store.set(f"rank {rank}", f"{socket.gethostname()} {host} {port}")
        await_ranks(store, num_ranks, check)
        self._token = bytes.fromhex(store.get("token").decode())
        texts = store.multi_get([f"rank {other}" for other in range(num_ranks)])
        names, hosts, ports = zip(*(text.decode().split() for text in texts), strict=True)
        self.hosts, self._places = names, [(host, int(port)) for host, port in zip(hosts, ports, strict=True)]
        self._notices: deque[tuple[int, bytearray]] = deque()
        self._late: list[tuple[Peer, Departure]] = []  # notices that have not left
        self._peers: dict[int, Peer] = {}
        self._lives: dict[int, socket.socket] = {}
        if rank:
            above = (rank - 1) // _BRANCHES
            self._lives[above] = self._connect(above, is_data=False)
            self._lives[above].setblocking(True)
        below = range(rank * _BRANCHES + 1, num_ranks)[:_BRANCHES]
        while not self._lives.keys() >= set(below):
            self._look(_CHECK_SECONDS)
        self._life = Life(rank, self._lives)
        os.register_at_fork(after_in_child=self._forget)

    # Connections.

    def _peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            self._peers[rank] = Peer(rank, self._connect, self._notices)
        return self._peers[rank]

    def _connect(self, rank: int, *, is_data: bool = True) -> socket.socket:
        connection = socket.create_connection(self._places[rank])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_GREETING.pack(self._token, self.rank, is_data))
        connection.setblocking(False)
        return connection

    def _accept(self) -> None:
        """Accepts a connection, whose first bytes will say whose it is."""
        try:
            connection, _ = self._server.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            refuse_descriptors(error)
            raise
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._greet, connection, bytearray()))

    def _greet(self, connection: socket.socket, given: bytearray) -> None:
        """Reads who connects; a stranger, who does not know the secret, is turned away."""
        with suppress(BlockingIOError, InterruptedError):
            data = b""
            with suppress(ConnectionError):
                data = connection.recv(_GREETING.size - len(given))
            given += data
            if data and len(given) < _GREETING.size:
                return
            self._selector.unregister(connection)
            token, rank, is_data = _GREETING.unpack(given.ljust(_GREETING.size, b"\0"))
            if not compare_digest(token, self._token) or rank >= len(self.hosts):
                connection.close()
            elif is_data:
                peer = self._peer(rank)
                peer.incoming = connection
                self._selector.register(connection, selectors.EVENT_READ, partial(self._pull, peer, connection))
            else:
                connection.setblocking(True)
                self._lives[rank] = connection

    def _pull(self, peer: Peer, connection: socket.socket) -> None:
        if not peer.pull():
            self._selector.unregister(connection)
            connection.close()

    def _look(self, seconds: float = 0.0) -> None:
        """Sends and takes what goes without waiting, or waits so long for something to come."""
        for peer in list(self._peers.values()):
            if not peer.is_quiet:
                peer.push()
        for key, _ in self._selector.select(seconds):
            key.data()

    # Messages.

    def send_far(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        departure = Departure(self, tensor)
        self._peer(destination).send((channel, tag), memory_of(tensor), departure)
        return DONE if departure.has_left else departure

    def receive_far(self, tensor: Tensor, source: int, channel: int, tag: int) -> TensorTransfer:
        arrival = Arrival(self, source, tensor, needs_calls=tensor.nbytes > SMALL_BYTES)
        peer = self._peer(source)
        if early := peer.early.get((channel, tag)):
            _fill(arrival, early.popleft())
        else:
            peer.posted[channel, tag].append(arrival)
        return arrival

    def advance(self) -> None:
        super().advance()
        self._look()

    # Notices.

    def send_notice(self, data: bytes, destination: int) -> None:
        departure, peer = Departure(self, None), self._peer(destination)
        peer.send((_NOTICE_CHANNEL, 0), memoryview(data), departure)
        if not departure.has_left:
            self._late.append((peer, departure))

    def are_notices_out(self) -> bool:
        if self._late:
            self._look()
            self._late = [(peer, each) for peer, each in self._late if not (each.has_left or peer.is_quiet)]
        return not self._late

    def poll_notices(self) -> Iterator[tuple[int, bytearray]]:
        self._look()
        while self._notices:
            yield self._notices.popleft()

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
        end_now(status)

    def close(self) -> None:
        self._life.tell(_GOODBYE)

    def _forget(self) -> None:
        """Closes what a child process has inherited: its parent's end must show."""
        of_peers = [each for peer in self._peers.values() for each in (peer.outgoing, peer.incoming)]
        for connection in [self._server, *of_peers, *self._lives.values()]:
            if connection is not None:
                connection.close()


class Life:
    """Ends this rank with the others, whatever it does, in a thread of its own.

    Its connections are with the rank above it and those below it, to which it passes on that one has ended.
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
        """Ends this rank and the others, since one has ended; says so if that one could not."""
        self.is_ending = True
        status = word[1] if word[:1] == _END and len(word) > 1 else 1
        self.tell(_END + bytes([status]))
        if not word and (other > self._rank or self._rank == 1):  # the one above it, or of rank 0 the first below
            write_error(f"rank {other} has ended without a word: it was killed, or has no memory left.\n")
        time.sleep(_LAUNCHER_SECONDS)
        end_now(status)


def open_store(store: Any, attempt: str) -> Any:
    """Returns the part of a store, or of that where the launcher says, for this start of the ranks.

    The script may use the same; a launcher that starts ranks again may keep it.
    """
    if store is None:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_START_SECONDS)))
    return PrefixStore(f"autovaruna {attempt}", store)


def place_of(store: Any) -> tuple[str, int]:
    """Returns an address that all ranks can reach: where a store is, or this host, if it is in a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if hasattr(store, "host"):
        return store.host, store.port
    try:
        return socket.gethostbyname(socket.gethostname()), 9  # any port: nothing is sent
    except OSError:  # a host whose name cannot be looked up
        return "127.0.0.1", 9


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
    num_here = store.add("ranks", 1)
    while num_here < num_ranks:
        waited = time.monotonic() - began
        if waited > _START_SECONDS or (waited > _REPORT_SECONDS and not has_told):
            missing = [rank for rank in range(num_ranks) if not store.check([f"rank {rank}"])]
            text = (
                f"ranks {missing} have not come to their first call for {waited:.0f} s: each process that the launcher "
                "has started, and each of a process group of the script's, wraps the model and calls it"
            )
            if waited > _START_SECONDS:
                raise RankError(f"{text}.")
            has_told = True
            logger.warning("%s", text)
        if waited > checked + _CHECK_SECONDS:
            checked = waited
            check()
        time.sleep(0.01 if waited < 1 else 0.1)
        num_here = store.add("ranks", 0)


def refuse_descriptors(error: OSError) -> None:
    """Raises a `RankError` that names the number to set if an error says that descriptors do not suffice."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise RankError(
            f"No descriptor is left for a connection with another rank: this process may have {limit}. Set "
            f"`ulimit -n {max(4096, 2 * limit)}` in the shell that starts the ranks, on every host."
        ) from error
