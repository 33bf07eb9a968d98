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
from dataclasses import replace
from typing import Any

import pytest

from autovaruna.ranks.tls import Authority, Connection, Credentials, Server, connect
from tests.hosts.emulation import wait_for

AUTHORITY = Authority()
OWN, OTHER = AUTHORITY.credentials("h1"), AUTHORITY.credentials("h2")
pytestmark = pytest.mark.timeout(120)


def echo(connection: Connection, request: Mapping[str, Any]) -> None:
    """Sends a request back."""
    connection.send_bytes(json.dumps(request).encode())


def ask(port: int, request: object) -> object:
    """Returns what a friend is answered."""
    with connect("127.0.0.1", port, OTHER, "h1") as connection:
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
            b"\x16\x03\x01" + struct.pack("!H", len(noise)) + noise,
            b'{"read": "credentials.json", "offset": 0, "count": 64}\n',
            b"GET / HTTP/1.1\r\n\r\n",
        )
    )


def test_bytes_of_strangers_end_nothing() -> None:
    server, draw = Server(OWN, echo), random.Random(0)
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
    server = Server(OWN, echo)
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(600)]
    assert ask(server.port, {"a": 1}) == {"a": 1}
    for stranger in crowd:
        stranger.close()


@pytest.mark.parametrize("request_", [b"no json", b"[]", b"\xff"])
def test_a_wrong_request_ends_its_connection_alone(request_: bytes) -> None:
    server = Server(OWN, lambda connection, request: echo(connection, {"got": request["it"]}))
    with connect("127.0.0.1", server.port, OTHER, "h1") as connection, pytest.raises(EOFError):
        connection.send_bytes(request_)
        connection.recv_bytes()
    assert ask(server.port, {"it": 3}) == {"got": 3}


def admits(port: int, own: Credentials, name: str) -> bool:
    """Says whether a server that is to be some host answers to some credentials."""
    try:
        with connect("127.0.0.1", port, own, name) as connection:
            connection.send_bytes(b'{"a": 1}')
            return bool(connection.recv_bytes())
    except (OSError, EOFError):
        return False


@pytest.mark.parametrize("is_open", [False, True])
def test_nothing_is_read_relayed_or_played_again_on_the_way(is_open: bool) -> None:
    """Once, whoever got the port of a host that had died handed a third host's challenge on, and both admitted him."""
    own, other = (AUTHORITY.credentials(name, is_open) for name in ("h1", "h2"))
    server, heard = Server(own, echo), bytearray()
    assert admits(server.port, other, "h1")
    assert not admits(server.port, other, "h3"), "he has the port of h3, and hands all on to h1"
    assert not admits(server.port, Authority().credentials("h2", is_open), "h1")
    forged = replace(Authority().credentials("h2", is_open), authority=own.authority)
    assert not admits(server.port, forged, "h1")
    with socket.create_server(("127.0.0.1", 0)) as between:
        threading.Thread(target=relay, args=(between, server.port, heard), daemon=True).start()
        with connect("127.0.0.1", between.getsockname()[1], other, "h1") as connection:
            connection.send_bytes(b'{"weights": "secret"}')
            assert b"secret" in connection.recv_bytes()
    wait_for(lambda: bool(heard), "what was heard")
    assert (b"secret" in heard) == is_open
    with socket.create_connection(("127.0.0.1", server.port)) as again:
        with suppress(OSError):
            again.sendall(heard)
        with suppress(ConnectionError):
            assert b"secret" not in again.recv(1 << 16)


def relay(between: socket.socket, port: int, heard: bytearray) -> None:
    """Hands bytes on both ways, and keeps those of the one who connects."""
    near, far = between.accept()[0], socket.create_connection(("127.0.0.1", port))

    def back() -> None:
        while data := far.recv(1 << 16):
            near.sendall(data)

    threading.Thread(target=back, daemon=True).start()
    while data := near.recv(1 << 16):
        heard.extend(data)
        far.sendall(data)
