"""Connections between processes of one job on any hosts, whose both ends prove that they know the job's token.

What goes over them is JSON and bytes, never pickles. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

MOST_BYTES = 8 << 20  # of one answer
_SILENT_SECONDS = 10  # after so long without a sign of life of the other host, whoever reads or writes gets an error
_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 64  # connections that have not proved anything yet; one more, and the oldest of them is closed


def connect(host: str, port: int, token: bytes) -> Connection:
    """Returns a connection to a `Server`; both sides prove that they know the token, which is not sent.

    Raises OSError if nobody is there, or it is another.
    """
    try:
        connection = Client((host, port), authkey=token)
    except Exception as error:  # AuthenticationError is no OSError
        raise OSError(f"{host}:{port}: {type(error).__name__} {error}") from error
    with socket.socket(fileno=os.dup(connection.fileno())) as end:  # a host without power sends no word of its end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):  # on Linux
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000)
    return connection


class Server:
    """Answers JSON requests on a port of its own, each connection in a thread, once both sides have proved the token.

    Strangers get nothing, and cost nothing but a closed connection.
    """

    def __init__(self, token: bytes, answer: Callable[[Connection, Mapping[str, Any]], None]) -> None:
        self._token, self._answer = token, answer
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
        watch = threading.Timer(_STRANGER_SECONDS, _shut, [watched])
        watch.daemon = True
        watch.start()
        try:
            with Connection(accepted.detach()) as connection:
                deliver_challenge(connection, self._token)
                answer_challenge(connection, self._token)
                watch.cancel()
                self._admit(watched)
                while True:
                    self._answer(connection, json.loads(connection.recv_bytes(MOST_BYTES)))
        except Exception:  # whatever a stranger sends, it ends with the connection
            pass
        finally:
            watch.cancel()
            self._admit(watched)
            watched.close()

    def _admit(self, watched: socket.socket) -> None:
        """Counts a connection as a stranger's no more."""
        with suppress(ValueError):
            self._strangers.remove(watched)


def _shut(watched: socket.socket) -> None:
    with suppress(OSError):
        watched.shutdown(socket.SHUT_RDWR)
