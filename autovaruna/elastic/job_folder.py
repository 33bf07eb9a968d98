"""The folder of a job in memory of a host: what ranks leave there, and the files by which they hear of something.

    attempt-00003/rank-00001/progress      how far the rank is, and what its last calls computed
                             predicted.json  what the plan predicts of all ranks
                             slot-0, slot-1  its part of a snapshot each: files, and a record that names them
                  copy-00002/slot-0, slot-1  the same of a rank of another host
                  copied                   the newest step of which another host has copies
                  ranks, alone             how many there are in this run; see below
    pinned/                                links to parts that are written to disk
    restore/                               the state for the next ranks, in the form of a checkpoint
    leave, hold, full, not-full, ahead.json, refused see below

A report of progress costs a microsecond, so every call makes two: a rank that hangs is told from those that wait for
it. A part is complete once its record is there, which is written last and removed first. Nothing here needs torch.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autovaruna.checkpoint.manifest import MANIFEST, Manifest, WrittenPart, index_and_state
from autovaruna.config.files import read_record, write_whole

VARIABLE = "VARUNA_JOB"  # where a rank of a job with a manager finds its `JobPlace`, as JSON
LEAVE, HOLD = "leave", "hold"  # ranks are to end at a step's border; to write no snapshots now
FULL, NOT_FULL = "full", "not-full"  # whether the host has room for snapshots
REFUSED = "refused"  # why a rank could not load the state that it was to go on from
AHEAD = "ahead.json"  # a rank asks for plans for fewer ranks
ALONE = "alone"  # in an attempt's folder: no copies arrive on the other host, and ranks do not wait for them
COPIED, NUM_RANKS, PINNED, RECORD = "copied", "ranks", "pinned", "part.json"
_PROGRESS, _PREDICTED = "progress", "predicted.json"
_FORMAT = struct.Struct("<QQ?Q?d?2q")
_WORK = struct.Struct("<Qd")
_NUM_WORKED = 64  # calls whose seconds of work are kept


@dataclass(frozen=True)
class JobPlace:
    """Where a rank leaves its reports and snapshots, and what the manager tells it."""

    folder: str  # in memory of this host, for this job alone
    attempt: int  # how often the job has been started before
    num_hosts: int = 1  # of this attempt; of several, each keeps a copy of another's part
    step: int | None = None  # of the state in ``folder/restore``; None: there is none
    checkpoints: str | None = None  # where the manager has states written to disk; None: nowhere
    deployment: str = ""  # the name of the file of this number of ranks' plan; empty: all numbers have one file
    factors: tuple[float, ...] = ()  # by rank, how many times as long as it should it took in many steps, if known

    @property
    def restore(self) -> Path:
        return Path(self.folder, "restore")

    def of_rank(self, rank: int) -> Path:
        return attempt_folder(Path(self.folder), self.attempt) / f"rank-{rank:05d}"


def job_place() -> JobPlace | None:
    """Returns the place of this process; None: no manager looks after its job."""
    text = os.environ.get(VARIABLE)
    return read_record(json.loads(text), JobPlace) if text else None


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
        with suppress(OSError):
            os.replace(folder / NOT_FULL, folder / FULL)  # a new file would take an inode, of which there may be none


def number_in(file: Path) -> int:
    """Returns the number that a file holds; -1: there is none."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return -1


# how far a rank is


@dataclass
class Progress:
    """How far a rank is."""

    process: int = 0
    calls: int = 0  # of the model, that it has begun
    is_inside: bool = False  # whether it is in one now
    steps: int = 0  # of the optimizer, of all attempts
    is_signalled: bool = False
    work_seconds: float = 0.0  # that its stages have computed, waits left out
    is_kept: bool = False  # whether it takes snapshots, so that it can leave at a border between two steps
    snapshots: tuple[int, int] = (-1, -1)  # the step of what is whole in each of its slots; -1: nothing is

    @staticmethod
    def read(rank_folder: Path) -> Progress | None:
        """Returns what a rank has last written; None: it has not started."""
        with suppress(OSError, struct.error):
            *numbers, first, second = _FORMAT.unpack((rank_folder / _PROGRESS).read_bytes()[: _FORMAT.size])
            progress = Progress(*numbers)
            progress.snapshots = first, second
            return progress
        return None


def read_work(rank_folder: Path) -> list[tuple[int, float]]:
    """Returns the last calls of a rank in which its stages have computed, each with for how many seconds."""
    with suppress(OSError):
        data = (rank_folder / _PROGRESS).read_bytes()[_FORMAT.size :]
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
        size = _FORMAT.size + _NUM_WORKED * _WORK.size
        with open(rank_folder / _PROGRESS, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # without room this is an error, a write to it the end
            self._memory = mmap.mmap(file.fileno(), size)
        self.write()

    def write(self) -> None:
        *numbers, snapshots = vars(self.progress).values()
        self._memory[: _FORMAT.size] = _FORMAT.pack(*numbers, *snapshots)

    def record_snapshot(self, slot: int, step: int) -> None:
        """Shows the step of what a slot holds; -1: nothing whole."""
        first, second = self.progress.snapshots
        self.progress.snapshots = (step, second) if slot == 0 else (first, step)
        self.write()

    def predict(self, seconds: Callable[[], Mapping[int, float]]) -> None:
        """Shows what the plan predicts of each rank's step, once."""
        if not self._has_predicted:
            self._has_predicted = True
            write_whole(self._folder / _PREDICTED, json.dumps(dict(seconds())), is_synced=False)

    def begin_call(self, steps: int, is_signalled: bool, work_seconds: float) -> None:
        progress = self.progress
        place = _FORMAT.size + progress.calls % _NUM_WORKED * _WORK.size
        _WORK.pack_into(self._memory, place, progress.calls, work_seconds - progress.work_seconds)
        progress.calls, progress.is_inside = progress.calls + 1, True
        progress.steps, progress.is_signalled, progress.work_seconds = steps, is_signalled, work_seconds
        self.write()

    def end_call(self) -> None:
        self.progress.is_inside = False
        self.write()


# its part of a snapshot


@dataclass(frozen=True)
class RankPart(WrittenPart):
    """What a rank has written of a snapshot."""

    step: int
    rank: int
    num_ranks: int
    extra_files: Mapping[str, str]  # texts of files that are the same whatever the ranks are; rank 0's alone

    def is_intact(self, slot: Path) -> bool:
        """Says whether the files in a slot are those that were written."""
        try:
            return not Manifest(self.step, self.files).damages(slot)
        except Exception:  # files that cannot be read are of no use either
            return False


def slots_of(rank_folder: Path) -> list[Path]:
    return [rank_folder / "slot-0", rank_folder / "slot-1"]


def read_part(slot: Path) -> RankPart | None:
    """Returns what a slot holds; None: nothing that is complete."""
    try:
        text, _, checksum = (slot / RECORD).read_bytes().rpartition(b"\n")
        return read_record(json.loads(text), RankPart) if int(checksum) == zlib.crc32(text) else None
    except (OSError, ValueError):
        return None


def write_record(slot: Path, part: RankPart) -> None:
    """Makes a part complete whose files are there: its record ends in a checksum, its time is the monotonic clock's."""
    new, now = slot / f".{RECORD}", time.monotonic()
    text = msgspec.json.encode(part)
    new.write_bytes(b"%b\n%d" % (text, zlib.crc32(text)))
    os.utime(new, (now, now))
    os.replace(new, slot / RECORD)


def clear_slot(slot: Path, names: Container[str]) -> None:
    """Makes a slot ready for a part: what it holds is no longer complete, and files of these names are overwritten.

    A file that has another link, as while a checkpoint is written, stays as it is there: a new one takes its place.
    """
    slot.mkdir(parents=True, exist_ok=True, mode=0o700)
    (slot / RECORD).unlink(missing_ok=True)
    for path in slot.iterdir():
        if path.name not in names or path.stat().st_nlink > 1:
            path.unlink()


def small_files(parts: Sequence[RankPart]) -> dict[str, str]:
    """Returns the texts of the files that make the parts of all ranks a checkpoint."""
    records = {name: record for part in parts for name, record in part.files.items()}
    manifest = {MANIFEST: Manifest(parts[0].step, records).to_json()}
    return index_and_state(parts) | manifest | {name: text for part in parts for name, text in part.extra_files.items()}
