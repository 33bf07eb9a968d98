"""Reads files of a checkpoint here, or, where a `Pointer` is in their place, from the keeper of another host."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from autovaruna.checkpoint.manifest import NotDamagedError
from autovaruna.config.files import read_record, write_whole
from autovaruna.ranks.tls import MOST_BYTES, Connection, Credentials, connect

CREDENTIALS = "credentials.json"  # the file in a job's folder with what only the job's user can read
_SUFFIX = ".elsewhere"
_ERRORS = (OSError, EOFError, ValueError)
ReadInto = Callable[[memoryview, int], int]
"""Reads bytes of a file from a place on and returns how many; 0: the file ends there."""


@dataclass(frozen=True)
class Pointer:
    """Where a file is: the keeper that has it, and what that knows it by."""

    host: str
    port: int
    name: str  # of the keeper's host in the job
    path: str

    def write(self, place: Path) -> None:
        """Puts the pointer where the file would be."""
        write_whole(_pointer_of(place), json.dumps(asdict(self)), is_synced=False)


def is_elsewhere(path: Path) -> bool:
    """Says whether a file lies in memory of another host."""
    return not path.exists() and _pointer_of(path).exists()


@contextmanager
def open_bytes(path: Path) -> Iterator[ReadInto]:
    """Opens a file, wherever it is; OSError if it cannot be, NotDamagedError if its host cannot be reached."""
    if not is_elsewhere(path):
        with open(path, "rb", buffering=0) as file:
            yield lambda view, place: os.preadv(file.fileno(), [view], place)
        return
    try:
        pointer = read_record(json.loads(_pointer_of(path).read_bytes()), Pointer)
        own = read_record(json.loads((path.parent.parent / CREDENTIALS).read_bytes()), Credentials)
        connection = connect(pointer.host, pointer.port, own, pointer.name)
    except _ERRORS as error:
        raise NotDamagedError(
            f"{path.name} lies in memory of another host, which cannot be reached: {error}"
        ) from error
    with connection:
        yield partial(_read_over, connection, threading.Lock(), pointer.path)


def _read_over(connection: Connection, lock: threading.Lock, path: str, view: memoryview, place: int) -> int:
    """Reads bytes that a keeper has in memory; several threads may. NotDamagedError if it does not answer any more."""
    request = {"read": path, "offset": place, "count": min(len(view), MOST_BYTES)}
    try:
        with lock:
            connection.send_bytes(json.dumps(request).encode())
            data = connection.recv_bytes()
    except _ERRORS as error:
        raise NotDamagedError(f"{path} cannot be read from memory of its host: {error}") from error
    view[: len(data)] = data
    return len(data)


def _pointer_of(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)
