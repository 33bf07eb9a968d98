"""Strangers cannot end, fill or block what serves the job's own."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from autovaruna.runtime.token_server import Server, connect
from tests.hosts.emulation import wait_for

TOKEN = b"t" * 64
pytestmark = pytest.mark.timeout(120)


def echo(connection: Connection, request: Mapping[str, Any]) -> None:
    """Sends a request back."""
    connection.send_bytes(json.dumps(request).encode())


def ask(port: int, request: object) -> object:
    """Returns what a friend is answered."""
    with connect("127.0.0.1", port, TOKEN) as connection:
        connection.send_bytes(json.dumps(request).encode())
        return json.loads(connection.recv_bytes())


def bytes_of_a_stranger(draw: random.Random) -> bytes:
    """Returns bytes that look more or less like the beginning of the protocol."""
    noise = draw.randbytes(draw.choice((0, 1, 3, 4, 20, 300)))
    return draw.choice(
        (
            noise,
            struct.pack("!i", len(noise)) + noise,
            struct.pack("!i", draw.choice((0x7FFFFFFF, -1, -2, 0, 256, 257))) + noise,
            struct.pack("!iQ", -1, draw.choice((1 << 62, 1 << 33, 5))) + noise,
            struct.pack("!i", 11 + len(noise)) + b"#CHALLENGE#" + noise,
            struct.pack("!i", 16) + draw.randbytes(16) + struct.pack("!i", 9) + b"#WELCOME#",
            b'{"read": "token", "offset": 0, "count": 64}\n',
            b"GET / HTTP/1.1\r\n\r\n",
        )
    )


def test_bytes_of_strangers_end_nothing() -> None:
    server, draw = Server(TOKEN, echo), random.Random(0)
    assert ask(server.port, {"a": 1}) == {"a": 1}
    num_threads, memory = threading.active_count(), 0
    for count in range(4_000):
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as stranger:
            stranger.sendall(bytes_of_a_stranger(draw))
        if count == 1000:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if count % 1000 == 999:
            assert ask(server.port, {"count": count}) == {"count": count}
    wait_for(lambda: threading.active_count() <= num_threads, "the end of all threads")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 8 << 10  # KiB
    assert len(os.listdir("/proc/self/fd")) < 200


def test_strangers_who_stay_keep_nobody_out() -> None:
    """Once, 256 silent connections kept a host's ranks from their state for 5 s, and again after that."""
    server = Server(TOKEN, echo)
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(600)]
    assert ask(server.port, {"a": 1}) == {"a": 1}
    for stranger in crowd:
        stranger.close()


@pytest.mark.parametrize("request_", [b"no json", b"[]", b"\xff"])
def test_a_wrong_request_ends_its_connection_alone(request_: bytes) -> None:
    server = Server(TOKEN, lambda connection, request: echo(connection, {"got": request["it"]}))
    with connect("127.0.0.1", server.port, TOKEN) as connection, pytest.raises(EOFError):
        connection.send_bytes(request_)
        connection.recv_bytes()
    assert ask(server.port, {"it": 3}) == {"got": 3}
