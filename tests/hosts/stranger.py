"""Is somebody who has no business with a job: another user of a host of it, or who is on another host of its network.

stranger.py attack ADDRESS NAME PORT...   tries what he can at ports of a host with that name in the job
stranger.py wait PORT                     takes the place of a keeper that has died, until it is killed
Prints ``got WORDS`` for whatever he could read of the job, or was asked to keep.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autovaruna.ranks.tls import Authority, Connection, Server, connect

FORGED = Authority().credentials("h1")
PART = {"files": {}, "weights": {}, "num_weight_bytes": 0, "documents": {}, "step": 10**9, "rank": 0, "num_ranks": 1}
REQUESTS = (
    *({"part": {**PART, "extra_files": {}}, "attempt": attempt} for attempt in range(9)),
    *({"read": place, "offset": 0, "count": 9} for place in ("keeper.lock", "credentials.json")),
)
RAW = (b"", b"\0" * 4096, b"[" * 100_000, b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", json.dumps(REQUESTS[0]).encode())
IN_FILES = ("/dev/shm/autovaruna-*/*", "/run/home/.autovaruna/jobs/*", "/proc/*/environ")


def tell(words: object) -> None:
    """Says what he has got."""
    print(f"got {words}", flush=True)


def ask(address: str, port: int, name: str) -> None:
    """Asks a server of a job as one of its hosts would; then without a look at its certificate."""
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    for request in map(json.dumps, REQUESTS):
        try:
            with suppress(OSError), connect(address, port, FORGED, name, 5.0) as connection:
                connection.send_bytes(request.encode())
                tell(connection.recv_bytes())
            stream = careless.wrap_socket(socket.create_connection((address, port), timeout=5.0))
        except OSError:
            return  # it speaks no TLS
        with suppress(OSError, EOFError), Connection(stream) as connection:
            connection.send_bytes(request.encode())
            tell(connection.recv_bytes())


def shout(address: str, port: int) -> None:
    """Sends what nobody expects; of what comes back without a secret, nothing is the job's."""
    for words in RAW:
        with suppress(OSError), socket.create_connection((address, port), timeout=5.0) as stream:
            stream.sendall(words)


def read_files() -> None:
    """Reads files of the job and of its processes."""
    for path in (each for pattern in IN_FILES for each in glob(pattern)):
        with suppress(OSError):
            if b"autovaruna" in Path(path).read_bytes()[: 1 << 20] and os.stat(path).st_uid != os.getuid():
                tell(path)


def wait(port: int) -> None:
    """Stands where a keeper stood, and takes whoever comes for one of its own."""

    def answer(connection: Connection, request: Mapping[str, Any]) -> None:
        tell(request)
        connection.send_bytes(b"taken")

    listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    with patch.object(socket, "create_server", lambda *_, **__: listener):
        Server(FORGED, answer)
    print("there", flush=True)
    signal.pause()


def main() -> None:
    """Is the stranger."""
    what, *words = sys.argv[1:]
    if what == "wait":
        wait(int(words[0]))
        return
    address, name, *ports = words
    read_files()
    for port in map(int, ports):
        shout(address, port)
        ask(address, port, name)
    print("done", flush=True)


if __name__ == "__main__":
    main()
