"""The folder of a run's checkpoints: each step has a folder of its own, which appears when it is complete.

  step-00000300/          complete: it has a manifest
  step-00000300.1/        the same step, saved again; it replaces the one above
  step-00000200.branch1/  saved after them, by a run that went back; so are all that follow, until one goes back again
  .step-00000400.x7ab/    on its way, or left behind by a run that was killed: no process has it locked
  .claim                  names the job that saves here, which has it locked; only one does

Names alone say which is the newest, whatever clocks say. A checkpoint that is loaded has a lock that many may have. The
system takes locks away when a job dies; where a file system has none, folders count as left behind, claims as free.
Nothing here needs torch, which a manager does not import; what compares requests of ranks imports it by itself.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autovaruna.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    Bytes,
    FileRecord,
    Manifest,
    WrittenPart,
    checksum,
    index_and_state,
    read_manifest,
)
from autovaruna.config.files import at_home
from autovaruna.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from autovaruna.ranks.world import World

logger = logging.getLogger(__name__)

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.branch(\d+))?(?:\.(\d+))?")
_PARTIAL = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}")
_PATIENCE_SECONDS = 5.0
CLAIM = ".claim"
_MARK = ".rank-"  # what names of files begin with that ranks have in the folder of a checkpoint while they write
_claims: dict[tuple[int, str], int] = {}  # the open claims of a process, by its number and the folder


@dataclass(frozen=True, order=True)
class Saved:
    """A complete checkpoint; the last in order was written last."""

    branch: int  # how often runs had gone back to an earlier step
    step: int
    edition: int  # how often it had been saved before
    path: Path


def saved_in(root: Path) -> list[Saved]:
    """Returns the complete checkpoints in a folder, the newest first; OSError if it cannot be read."""
    found = []
    for entry in os.scandir(root):
        match = _COMPLETE.fullmatch(entry.name)
        if match and (Path(entry.path) / MANIFEST).exists():
            found.append(Saved(int(match[2] or 0), int(match[1]), int(match[3] or 0), Path(entry.path)))
    return sorted(found, reverse=True)


def words_of_newest(root: str | os.PathLike[str]) -> str:
    """Says which step in a folder is the newest that can be loaded."""
    with suppress(OSError):
        for saved in saved_in(Path(root)):
            with suppress(CheckpointError):
                if not read_manifest(saved.path).damages(saved.path):
                    return f"The newest step that can be loaded is {saved.step}: {saved.path}"
    return f"No step can be loaded from {root}"


def has_checkpoints(root: str | os.PathLike[str] | None) -> bool:
    """Says whether a folder is there and has a complete checkpoint, intact or not."""
    path = Path(at_home(root or ""))
    return root is not None and path.is_dir() and (bool(saved_in(path)) or (path / MANIFEST).exists())


def begin(root: Path, step: int, locks: ExitStack) -> Path:
    """Makes the folder that a checkpoint is written to, and removes what killed runs left; OSError, CheckpointError."""
    root.mkdir(parents=True, exist_ok=True)
    _claim(root)
    with lock(root, waits=True):
        for entry in os.scandir(root):
            if _PARTIAL.fullmatch(entry.name):
                remove_unlocked(Path(entry.path))
        path = _partial_path(root, step)
        path.mkdir()
        locks.enter_context(lock(path))
    return path


def _claim(root: Path) -> None:
    """Makes this process the only one that saves to a folder, until it ends; CheckpointError if another is."""
    key = os.getpid(), os.path.realpath(root)
    path = root / CLAIM
    if key in _claims and path.exists() and os.path.samestat(os.fstat(_claims[key]), path.stat()):
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.lockf):
        if time.monotonic() > deadline:
            other = _words_of(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"Another job saves to {root}: {other}. Expected one job a folder: what two save would be mixed up, "
                "and keep= of one would remove checkpoints of the other. Name another folder, or end that job."
            )
        time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {key[0]} on {socket.gethostname()}, since {time.ctime()}".encode(), 0)
    _claims[key] = descriptor


def other_job(root: Path) -> str:
    """Returns which other job saves to a folder, in words; empty: none."""
    if (os.getpid(), os.path.realpath(root)) in _claims:  # to close the file would give the claim up
        return ""
    try:
        with open(os.open(root / CLAIM, os.O_RDWR | os.O_NOFOLLOW), "rb") as file:
            is_free = _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.lockf)
            return "" if is_free else _words_of(file.fileno())
    except OSError:
        return ""


def _words_of(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "one that has just begun"


def _partial_path(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.{secrets.token_hex(4)}"


def remove_unlocked(path: Path) -> bool:
    """Removes a folder that no process has locked; returns False if one has."""
    try:
        with lock(path) as is_alone:
            if is_alone:
                shutil.rmtree(path, ignore_errors=True)
            return is_alone
    except OSError:
        return True  # it has gone


def mark_of(folder: Path, rank: int) -> Path:
    """Returns the mark of a rank that is writing; it goes when the checkpoint is complete."""
    return folder / f"{_MARK}{rank:05d}"


def write_file(path: Path, chunks: Iterable[Bytes], syncs: bool = True, is_new: bool = True) -> FileRecord:
    """Writes a file chunk by chunk, and sums each; on the disk if it `syncs`, in its old place if not `is_new`."""
    size, checksums = 0, []
    with open(path, "wb" if is_new or not path.exists() else "r+b") as file:
        for chunk in chunks:
            checksums.append(checksum(chunk))
            size += file.write(chunk.data)
        file.truncate()
        if syncs:
            file.flush()
            os.fsync(file.fileno())
    return FileRecord(size, tuple(checksums))


def commit(
    partial: Path, step: int, parts: Sequence[WrittenPart], extra_files: dict[str, bytes], keep: int | None
) -> Path:
    """Writes what is still missing, gives the checkpoint its name, and then removes old ones, if it can be read."""
    try:
        small = {name: text.encode() for name, text in index_and_state(parts).items()} | extra_files
        records = {name: write_file(partial / name, _chunks(data)) for name, data in small.items()}
        for part in parts:
            records |= part.files
        write_file(partial / MANIFEST, _chunks(Manifest(step, records).to_json().encode()))
        for mark in partial.glob(f"{_MARK}*"):
            mark.unlink()
        sync_folder(partial)
        if keep and (damages := read_manifest(partial).damages(partial)):
            raise CheckpointError(
                f"{'; '.join(damages)}, as it was just written. Earlier checkpoints are as they were."
            )
        complete = finish(partial, step)
        remove_old(complete, keep)
        return complete
    except OSError as error:
        raise cannot_write(partial, error) from error


def _chunks(data: bytes) -> list[Bytes]:
    return [np.frombuffer(data[begin : begin + CHUNK_BYTES], np.uint8) for begin in range(0, len(data), CHUNK_BYTES)]


def finish(partial: Path, step: int) -> Path:
    """Gives a checkpoint, all of which is on the disk, its name: from now on it is there. Returns its folder."""
    root = partial.parent
    with lock(root, waits=True):
        path = _next(root, step)
        os.rename(partial, path)
    sync_folder(root)
    return path


def sync_folder(path: Path) -> None:
    """Makes sure that the names in a folder are on the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def _next(root: Path, step: int) -> Path:
    """Returns the first free name that is newer than all that are there."""
    newest = next(iter(saved_in(root)), Saved(0, -1, 0, root))
    branch = newest.branch + (step < newest.step)
    edition = newest.edition + 1 if step == newest.step else 0
    stem = f"step-{step:08d}{f'.branch{branch}' if branch else ''}"
    while (path := root / (f"{stem}.{edition}" if edition else stem)).exists():
        edition += 1
    return path


def remove_old(newest: Path, keep: int | None) -> None:
    """Removes what else there is of the newest step, and all but the last `keep` checkpoints."""
    step = int(_COMPLETE.fullmatch(newest.name)[1])  # type: ignore[index]
    others = [saved for saved in saved_in(newest.parent) if saved.step != step]
    doomed = [saved for saved in saved_in(newest.parent) if saved.step == step and saved.path != newest]
    for saved in doomed + (others[keep - 1 :] if keep else []):
        _remove(saved)


def _remove(saved: Saved) -> None:
    """Removes a checkpoint that nobody reads: its name first, so that what is left is never taken for one."""
    doomed = _partial_path(saved.path.parent, saved.step)
    try:
        with lock(saved.path) as is_alone:
            if not is_alone:
                return
            os.rename(saved.path, doomed)
    except FileNotFoundError:
        return  # another job has removed it
    except OSError as error:  # the new one is complete, whatever becomes of this
        logger.warning("the old checkpoint %s cannot be removed: %s", saved.path, error.strerror)
        return
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def lock(path: Path, waits: bool = False) -> Iterator[bool]:
    """Locks a folder, after all others are done if `waits`; else says whether nobody else has it locked."""
    with _opened(path) as descriptor:
        yield _lock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


@contextmanager
def lock_to_read(path: Path) -> Iterator[None]:
    """Keeps a folder from being removed while it is read; FileNotFoundError if it is not there, or is just removed."""
    with _opened(path) as descriptor:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB) and time.monotonic() < deadline and path.exists():
            time.sleep(0.01)  # it is being removed, or has just been completed
        if not (path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor))):
            raise FileNotFoundError(f"{path} has been removed")
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing leaves it to processes that were forked meanwhile
        os.close(descriptor)


def _lock(descriptor: int, how: int, call: Callable[[int, int], object] = fcntl.flock) -> bool:
    """Locks an open file or folder; returns False if another has it locked."""
    try:
        call(descriptor, how)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # else there are no locks here
    return True


def place_of(given: str | os.PathLike[str]) -> str:
    """Returns the path that a script gives; InputError if no file can have it."""
    path = at_home(given) if isinstance(given, str | os.PathLike) else ""
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"The folder of checkpoints is {given!r}; expected a path, as 'checkpoints'.")
    return path


def different_requests(world: World, place: str, own: Mapping[str, str], what: str) -> str:
    """Returns in words what ranks ask for in another way than rank 0; empty: nothing. Collective."""
    from autovaruna.ranks.exchange import differences

    real = place
    with suppress(OSError):  # the folder that the script is in may have gone
        real = os.path.realpath(place)
    every = world.gather_objects((dict(own), place, real), what)
    is_one = len({given for _, given, _ in every}) == 1
    return differences([mine if is_one else {**mine, "dir": its} for mine, _, its in every])


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Returns the error that says which file could not be written, and why."""
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}. The checkpoint is not complete and has been removed; "
        "earlier ones are as they were. Make room, or save to a folder that can be written to."
    )
