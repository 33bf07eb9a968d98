"""What ranks have in memory of their hosts of a state, and the connections over which other hosts read it.

A rank has written a `RankPart` of a snapshot. A file that lies on another host has a `Pointer` in its place: what is
needed of it comes over a connection to the keeper of that host. Both ends of a connection prove that they know the
job's token; bytes and JSON go over it, never pickles. All of this is read without torch.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import msgspec

from autovaruna.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from autovaruna.config.files import read_record, write_whole
from autovaruna.errors import CheckpointError

INDEX = "model.safetensors.index.json"
STATE = "state.json"
PER_RANK = ("optimizer_state", "generators")  # what ``state.json`` has from every rank
LEAVE, HOLD, COPIED = "leave", "hold", "copied"
"""Files by which a keeper tells its ranks to end at a step's border, to write nothing now, and what step others have
copies of."""
PINNED = "pinned"  # the folder where a keeper has links to what is written to disk
RECORD = "part.json"
_SLOTS = ("slot-0", "slot-1")

TOKEN = "token"  # the file in a job's folder with what only the job's user can read
MOST_BYTES = 8 << 20  # of one answer
_SUFFIX = ".elsewhere"
_SILENT_SECONDS = 10  # after so long without a sign of life of the other host, whoever reads or writes gets an error
_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 64  # connections that have not proved anything yet; one more, and the oldest of them is closed
_ERRORS = (OSError, EOFError, ValueError)


@dataclass(frozen=True)
class RankPart:
    """What a rank has written of a snapshot."""

    step: int
    rank: int
    num_ranks: int
    files: Mapping[str, FileRecord]
    weights: Mapping[str, str]  # the file of each weight among them, by name
    documents: Mapping[str, Any]  # its share of ``state.json``
    extra_files: Mapping[str, str]  # texts of files that are the same whatever the ranks are; rank 0's alone

    def is_intact(self, slot: Path) -> bool:
        """Says whether the files in a place are those that were written."""
        try:
            return not Manifest(self.step, self.files).damages(slot)
        except Exception:  # files that cannot be read are of no use either
            return False


def read_part(slot: Path) -> RankPart | None:
    """Returns what a place for snapshots holds; None: nothing that is complete."""
    try:
        return read_record(json.loads((slot / RECORD).read_bytes()), RankPart)
    except (OSError, ValueError):
        return None


def write_record(slot: Path, part: RankPart) -> None:
    """Makes a part complete whose files are there."""
    new = slot / f".{RECORD}"
    new.write_bytes(msgspec.json.encode(part))
    os.replace(new, slot / RECORD)


def clear_slot(slot: Path, names: Container[str]) -> None:
    """Makes a place ready for a part: what it holds is no longer complete, and files of these names are overwritten.

    A file that has another link, as while a checkpoint is written, stays as it is there: a new one takes its place.
    """
    slot.mkdir(parents=True, exist_ok=True, mode=0o700)
    (slot / RECORD).unlink(missing_ok=True)
    for path in slot.iterdir():
        if path.name not in names or path.stat().st_nlink > 1:
            path.unlink()


def slots_of(rank_folder: Path) -> list[Path]:
    """Returns the places of a rank's snapshots."""
    return [rank_folder / name for name in _SLOTS]


def joined_documents(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns ``state.json`` from the ranks' shares."""
    state: dict[str, Any] = {}
    for share in shares:
        for key, content in share.items():
            if key in PER_RANK:
                state.setdefault(key, {}).update(content)
            else:
                state[key] = content
    return state


def small_files(parts: Sequence[RankPart]) -> dict[str, str]:
    """Returns the texts of the files that make the parts of all ranks a checkpoint."""
    weights = {name: file for part in parts for name, file in part.weights.items()}
    records = {name: record for part in parts for name, record in part.files.items()}
    return {
        INDEX: json.dumps({"metadata": {}, "weight_map": dict(sorted(weights.items()))}),
        STATE: json.dumps(joined_documents([part.documents for part in parts])),
        MANIFEST: Manifest(parts[0].step, records).to_json(),
        **{name: text for part in parts for name, text in part.extra_files.items()},
    }


def copy_synced(source: Path, target: Path) -> None:
    """Copies a file to the disk."""
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Pointer:
    """Where a file is: the keeper that has it, and what that knows it by."""

    host: str
    port: int
    path: str

    def write(self, place: Path) -> None:
        """Puts the pointer where the file would be."""
        write_whole(_pointer_of(place), json.dumps(asdict(self)), is_synced=False)


ReadInto = Callable[[memoryview, int], int]
"""Reads bytes of a file from a place on and returns how many; 0: the file ends there."""


def is_elsewhere(path: Path) -> bool:
    """Says whether a file lies in memory of another host."""
    return not path.exists() and _pointer_of(path).exists()


@contextmanager
def open_bytes(path: Path) -> Iterator[ReadInto]:
    """Opens a file, wherever it is; OSError if it cannot be, CheckpointError if its host cannot be reached."""
    if not is_elsewhere(path):
        with open(path, "rb", buffering=0) as file:
            yield lambda view, place: os.preadv(file.fileno(), [view], place)
        return
    try:
        pointer = read_record(json.loads(_pointer_of(path).read_bytes()), Pointer)
        connection = connect(pointer.host, pointer.port, (path.parent.parent / TOKEN).read_bytes())
    except _ERRORS as error:
        raise CheckpointError(
            f"{path.name} lies in memory of another host, which cannot be reached: {error}"
        ) from error
    with connection:
        yield partial(_read_over, connection, threading.Lock(), pointer.path)


def _read_over(connection: Connection, lock: threading.Lock, path: str, view: memoryview, place: int) -> int:
    """Reads bytes that a keeper has in memory; several threads may. CheckpointError if it does not answer any more."""
    request = {"read": path, "offset": place, "count": min(len(view), MOST_BYTES)}
    try:
        with lock:
            connection.send_bytes(json.dumps(request).encode())
            data = connection.recv_bytes(MOST_BYTES)
    except _ERRORS as error:
        raise CheckpointError(f"{path} cannot be read from memory of its host: {error}") from error
    view[: len(data)] = data
    return len(data)


def _pointer_of(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


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
        watch = threading.Timer(_STRANGER_SECONDS, _shut, [watched])
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
