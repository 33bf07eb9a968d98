"""Serves JSON requests to whoever knows a token; strangers get nothing, and cost nothing but a closed connection."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from autovaruna.checkpoint.elsewhere import MOST_BYTES

_PATIENCE_SECONDS = 5.0
_MOST_STRANGERS = 64
"""Connections that have not proved anything yet; one more, and the oldest of them is closed."""


class Server:
    """Answers requests on a port of its own, each connection in a thread, once both sides have proved the token."""

    def __init__(self, token: bytes, answer: Callable[[Connection, Mapping[str, Any]], None]) -> None:
        self._token = token
        self._answer = answer
        self._strangers: deque[socket.socket] = deque()
        self._listener = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                continue
            self._strangers.append(watched := accepted.dup())
            if len(self._strangers) > _MOST_STRANGERS:
                _shut(self._strangers.popleft())
            threading.Thread(target=self._attend, args=(accepted, watched), daemon=True).start()

    def _attend(self, accepted: socket.socket, watched: socket.socket) -> None:
        watch = threading.Timer(_PATIENCE_SECONDS, _shut, [watched])
        watch.daemon = True
        watch.start()
        try:
            with Connection(accepted.detach()) as connection:
                deliver_challenge(connection, self._token)
                answer_challenge(connection, self._token)
                watch.cancel()
                self._know(watched)
                while True:
                    self._answer(connection, json.loads(connection.recv_bytes(MOST_BYTES)))
        except Exception:  # whatever a stranger sends, it ends with the connection
            pass
        finally:
            watch.cancel()
            self._know(watched)
            watched.close()

    def _know(self, watched: socket.socket) -> None:
        """Counts a connection as a stranger's no more."""
        with suppress(ValueError):
            self._strangers.remove(watched)


def _shut(watched: socket.socket) -> None:
    with suppress(OSError):
        watched.shutdown(socket.SHUT_RDWR)
