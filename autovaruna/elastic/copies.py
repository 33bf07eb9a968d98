"""Sends a rank's part of a snapshot to the keeper of another host, at a pace that leaves the network to the steps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from autovaruna.elastic.job_folder import read_part
from autovaruna.ranks.tls import MOST_BYTES, Connection

_PIECE_SECONDS = 5e-3  # of the link, so that what a step sends never waits for longer behind a piece
_TRIAL_SECONDS = 0.15  # of the link, by which its rate is measured: what a queue takes at once counts for little
_SLOWEST = 1e6  # bytes a second that a link is taken to carry before its rate is known: whatever took longer waited
_LEAST_BYTES = 16 << 10
_FIRST_BYTES = 64 << 10
_LOOK_SECONDS = 0.02


class CopyPace:
    """Holds copies to a share of their link: after each piece comes a pause, so many times as long as the link needs.

    The first pieces of each part are a trial: they are doubled until one takes long enough to say what the link carries
    in a second. What then takes twice as long as that says has met something else on the link: the share is halved.
    `is_hurried` says that nobody else needs the link; it may raise what ends the copying.
    """

    def __init__(self, share: float, is_hurried: Callable[[], bool]) -> None:
        self.arrived_at = 0.0  # when the last piece had, on the monotonic clock
        self._share, self._is_hurried = share, is_hurried
        self._trial_bytes = _FIRST_BYTES
        self._bytes_per_second: float | None = None
        self._least_seconds, self._least_bytes = math.inf, 0  # of the quickest piece, there and its answer back
        self._next = 0.0

    def begin_part(self) -> None:
        """Has the link's rate measured anew."""
        self._bytes_per_second = None

    def num_bytes(self) -> int:
        """Waits until there may be another piece, and returns of how many bytes."""
        while not (is_hurried := self._is_hurried()) and (left := self._next - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
        if is_hurried:
            return MOST_BYTES
        rate = self._bytes_per_second
        return self._trial_bytes if rate is None else _bytes_in(_PIECE_SECONDS, rate)

    def record(self, num_bytes: int, seconds: float) -> None:
        """Records that a piece has arrived just now, after so many seconds."""
        self.arrived_at = time.monotonic()
        self._least_seconds, self._least_bytes = min((self._least_seconds, self._least_bytes), (seconds, num_bytes))
        busy = max(seconds - self._least_seconds, seconds / 10)
        if self._bytes_per_second is not None:
            alone = num_bytes / self._bytes_per_second
            busy = 2 * alone if busy > 2 * alone else alone
        elif num_bytes < self._trial_bytes:  # what is left of a file, or all of a small one
            busy = min(busy, num_bytes / _SLOWEST)
        elif busy > _TRIAL_SECONDS / 1.5 or num_bytes >= MOST_BYTES:
            self._bytes_per_second = max(num_bytes - self._least_bytes, num_bytes / 2) / busy
            self._trial_bytes = _bytes_in(_TRIAL_SECONDS, self._bytes_per_second)
        else:
            self._trial_bytes = min(2 * self._trial_bytes, MOST_BYTES)
        self._next = self.arrived_at - seconds + busy / self._share


def _bytes_in(seconds: float, bytes_per_second: float) -> int:
    return min(max(int(seconds * bytes_per_second), _LEAST_BYTES), MOST_BYTES)


def send_part(connection: Connection, slot: Path, attempt: int, pace: CopyPace) -> None:
    """Copies what a slot holds to a keeper, which answers each piece; OSError if it is not taken."""
    part = read_part(slot)
    if part is None:
        raise OSError("the part has gone")
    connection.send_bytes(json.dumps({"part": asdict(part), "attempt": attempt}).encode())
    pace.begin_part()
    for name, record in part.files.items():
        with open(slot / name, "rb") as file:
            while file.tell() < record.size:
                piece, begin = file.read(min(pace.num_bytes(), record.size - file.tell())), time.monotonic()
                connection.send_bytes(piece)
                connection.recv_bytes()
                pace.record(len(piece), time.monotonic() - begin)
    if connection.recv_bytes() != b"taken":
        raise OSError("the copy was not taken")
