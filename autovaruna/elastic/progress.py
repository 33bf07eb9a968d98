"""What a rank reports while a manager looks after its job, in memory that the keeper of its host reads.

A report costs a microsecond, so every call makes two. So a rank that hangs is told from those that wait for it.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autovaruna.config.files import write_whole

VARIABLE = "VARUNA_JOB"
"""Holds where a rank of a job with a manager finds its host's memory, as JSON."""
SAVED = 75  # what a rank, or the job, ends with that can be started again from what it has saved (EX_TEMPFAIL)
HELD = 76  # what a rank ends with whose state is in memory of its host, and nowhere else yet
_FORMAT = struct.Struct("<QQ?Q?d?2q")
_NUM_KEPT = 64
_WORK = struct.Struct("<Qd")
_FILE, _PREDICTED = "progress", "predicted.json"
AHEAD = "ahead.json"  # the file in a job's folder by which a rank asks for plans for fewer ranks
FULL = "full"  # the file that tells a keeper that its host has no room for snapshots


@dataclass(frozen=True)
class JobPlace:
    """Where a rank leaves its reports and snapshots, and what the manager tells it.

    Attributes:
        folder: a folder in memory of this host, for this job alone.
        attempt: how often the job has been started before.
        num_hosts: hosts of this attempt; of several, each keeps a copy of another's part.
        step: what the state in ``folder/restore`` is of; None: there is none, the job starts from the beginning.
        checkpoints: where the manager has states written to disk; None: nowhere.
        deployment: the name of the file of this number of ranks' plan; empty: all numbers have one file.
        factors: by rank, how many times as long as it should it took in many steps; empty: not known.
    """

    folder: str
    attempt: int
    num_hosts: int = 1
    step: int | None = None
    checkpoints: str | None = None
    deployment: str = ""
    factors: tuple[float, ...] = ()

    @property
    def restore(self) -> Path:
        """The state to go on from, in the form of a checkpoint."""
        return Path(self.folder, "restore")

    def of_rank(self, rank: int) -> Path:
        return attempt_folder(Path(self.folder), self.attempt) / f"rank-{rank:05d}"


def folders_in(folder: Path, prefix: str) -> list[Path]:
    """Returns what is in a folder by the beginning of its name, in order; nothing, if the folder has gone meanwhile."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.startswith(prefix))
    except OSError:
        return []


def deployment_name(counts: Collection[int]) -> str:
    """Returns the file of the plan for so many ranks on each host."""
    return f"deployment-{'-'.join(map(str, counts))}.json"


def attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt-{attempt:05d}"


def record_full(folder: Path, error: BaseException) -> None:
    """Records in a job's folder that this host has no room, if an error says so."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        (folder / FULL).touch()  # an empty file needs none


def job_place() -> JobPlace | None:
    """Returns the place of this process; None: no manager looks after its job."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    place = json.loads(text)
    return JobPlace(**{**place, "factors": tuple(place.get("factors", ()))})  # to be compared and hashed


@dataclass
class Progress:
    """How far a rank is.

    Attributes:
        calls, is_inside: calls of the model that it has begun, and whether it is in one of them now.
        steps: steps of the optimizer, of all attempts.
        work_seconds: seconds that its stages have computed, waits left out.
        is_kept: whether it takes snapshots, so that it can leave at a border between two steps.
        snapshots: the step of what is whole in each of its two places for snapshots; -1: nothing is.
    """

    process: int = 0
    calls: int = 0
    is_inside: bool = False
    steps: int = 0
    is_asked_to_end: bool = False
    work_seconds: float = 0.0
    is_kept: bool = False
    snapshots: tuple[int, int] = (-1, -1)

    def pack(self) -> bytes:
        *numbers, snapshots = vars(self).values()
        return _FORMAT.pack(*numbers, *snapshots)

    @staticmethod
    def read(rank_folder: Path) -> Progress | None:
        """Returns what a rank has last written; None: it has not started."""
        with suppress(OSError, struct.error):
            *numbers, first, second = _FORMAT.unpack((rank_folder / _FILE).read_bytes()[: _FORMAT.size])
            progress = Progress(*numbers)
            progress.snapshots = first, second
            return progress
        return None


def read_work(rank_folder: Path) -> list[tuple[int, float]]:
    """Returns the last calls of a rank in which its stages have computed, each with for how many seconds."""
    with suppress(OSError):
        data = (rank_folder / _FILE).read_bytes()[_FORMAT.size :]
        return sorted(entry for entry in _WORK.iter_unpack(data) if entry[1] > 0)
    return []


def read_predicted(rank_folder: Path) -> dict[str, float]:
    """Returns what the plan predicts that the stages of each rank compute in a step, seconds; empty: not known yet."""
    with suppress(OSError, ValueError):
        return dict(json.loads((rank_folder / _PREDICTED).read_bytes()))
    return {}


class Reporter:
    """Writes a rank's progress."""

    def __init__(self, rank_folder: Path) -> None:
        rank_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = rank_folder
        self._has_predicted = False
        self.progress = Progress(os.getpid())
        size = _FORMAT.size + _NUM_KEPT * _WORK.size
        with open(rank_folder / _FILE, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # without room this is an error, a write to it the end
            self._memory = mmap.mmap(file.fileno(), size)
        self.write()

    def write(self) -> None:
        self._memory[: _FORMAT.size] = self.progress.pack()

    def record_snapshot(self, place: int, step: int) -> None:
        """Shows the step of what a place for snapshots holds; -1: nothing whole."""
        first, second = self.progress.snapshots
        self.progress.snapshots = (step, second) if place == 0 else (first, step)
        self.write()

    def predict(self, seconds: Callable[[], Mapping[int, float]]) -> None:
        """Shows what the plan predicts of each rank's step, once."""
        if not self._has_predicted:
            self._has_predicted = True
            write_whole(self._folder / _PREDICTED, json.dumps(dict(seconds())), is_synced=False)

    def begin_call(self, steps: int, is_asked_to_end: bool, work_seconds: float) -> None:
        progress = self.progress
        place = _FORMAT.size + progress.calls % _NUM_KEPT * _WORK.size
        work = progress.calls, work_seconds - progress.work_seconds
        self._memory[place : place + _WORK.size] = _WORK.pack(*work)
        progress.calls, progress.is_inside = progress.calls + 1, True
        progress.steps, progress.is_asked_to_end, progress.work_seconds = steps, is_asked_to_end, work_seconds
        self.write()

    def end_call(self) -> None:
        self.progress.is_inside = False
        self.write()
