"""Reads files of a checkpoint's form: those of this host, and those that lie in memory of another one.

A file that is elsewhere has a pointer in its place. What is needed of it comes over a connection to the keeper of that
host, which both sides open by proving that they know the job's token; bytes and JSON go over it, never pickles.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Protocol

from autovaruna.config.files import read_record, write_whole
from autovaruna.errors import CheckpointError

TOKEN = "token"
"""The file in a job's folder with what only the job's user can read."""
MOST_BYTES = 8 << 20
"""Of one answer."""
_SUFFIX = ".elsewhere"
_SILENT_SECONDS = 10
"""After so long without a sign of life of the other host, whoever reads or writes gets an error."""
_ERRORS = (OSError, EOFError, ValueError)


@dataclass(frozen=True)
class Pointer:
    """Where a file is: the keeper that has it, and what that knows it by."""

    host: str
    port: int
    path: str

    def write(self, place: Path) -> None:
        """Puts the pointer where the file would be."""
        write_whole(_pointer_of(place), json.dumps(asdict(self)), is_synced=False)


class ByteFile(Protocol):
    """A file whose bytes can be read."""

    def read_into(self, view: memoryview, place: int) -> int:
        """Reads bytes from `place` on and returns how many; 0: the file ends there."""
        ...


class OwnFile:
    """A file of this host."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, view: memoryview, place: int) -> int:
        """Reads bytes from `place` on and returns how many."""
        return os.preadv(self._descriptor, [view], place)


class FileElsewhere:
    """A file that another host's keeper has in memory; several threads may read it."""

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._lock = threading.Lock()

    def read_into(self, view: memoryview, place: int) -> int:
        """Reads bytes from `place` on and returns how many; CheckpointError if the keeper does not answer any more."""
        count = min(len(view), MOST_BYTES)
        request = {"read": self._path, "offset": place, "count": count}
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(request).encode())
                data = self._connection.recv_bytes(MOST_BYTES)
        except _ERRORS as error:
            raise CheckpointError(f"{self._path} cannot be read from memory of its host: {error}") from error
        view[: len(data)] = data
        return len(data)


def is_elsewhere(path: Path) -> bool:
    """Says whether a file lies in memory of another host."""
    return not path.exists() and _pointer_of(path).exists()


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteFile]:
    """Opens a file, wherever it is; OSError if it cannot be, CheckpointError if its host cannot be reached."""
    if not is_elsewhere(path):
        with open(path, "rb", buffering=0) as file:
            yield OwnFile(file.fileno())
        return
    try:
        pointer = read_record(json.loads(_pointer_of(path).read_bytes()), Pointer)
        connection = connect(pointer.host, pointer.port, (path.parent.parent / TOKEN).read_bytes())
    except _ERRORS as error:
        raise CheckpointError(
            f"{path.name} lies in memory of another host, which cannot be reached: {error}"
        ) from error
    with connection:
        yield FileElsewhere(connection, pointer.path)


def connect(host: str, port: int, token: bytes) -> Connection:
    """Returns a connection to a keeper; both sides prove that they know the token, which is not sent.

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


def _pointer_of(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)
