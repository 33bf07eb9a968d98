"""Finds, watches and ends processes of a job on this host; locks that go with a process."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import autovaruna
from autovaruna.ranks.launcher import text_of

SILENT_SECONDS = 30.0  # after so long without a word of the manager, a keeper takes it for lost, and ends its ranks
_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_ALONE_SECONDS = 2.0  # a keeper whose manager has not spoken to it for so long may be replaced


def versions() -> dict[str, str]:
    """Returns the versions of what numbers depend on, on this host; empty for what is missing."""
    found = {"Python": platform.python_version(), "autovaruna": autovaruna.__version__}
    try:
        return {**found, "torch": version("torch")}
    except PackageNotFoundError:
        return {**found, "torch": ""}


def processes_with(words: bytes) -> list[int]:
    """Returns the processes of this host, but not this one, whose variables or command line hold some words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if words in (entry / "environ").read_bytes() or words in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def end_all(words: bytes) -> int:
    """Kills the processes whose variables or command line hold some words, and waits; returns how many there were."""
    num_ended = 0
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (left := list(filter(is_alive, processes_with(words)))) and time.monotonic() < deadline:
        num_ended += len(left)
        for process in left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    return num_ended


def state_of(process: int) -> str:
    """Returns the state of a process as the system names it: ``T`` is stopped, ``Z`` has ended; empty: it has gone."""
    return _stat_of(process)[0]


def birth_of(process: int) -> str:
    """Returns when a process began, which tells it from a later one of its number; empty: it has gone."""
    state, *others = _stat_of(process)
    return "" if state in ("", "Z") else others[18]


def _stat_of(process: int) -> list[str]:
    return text_of(Path(f"/proc/{process}/stat")).rpartition(")")[2].split() or [""]


def memory_kills() -> int:
    """Returns how many processes the kernel has ended because memory was short, as far as it says so."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split()[0])
    return 0


def is_alive(process: int) -> bool:
    """Says whether a process is there and has not ended."""
    return state_of(process) not in ("", "Z")


def acquire_lock(lock: Path) -> int | None:
    """Acquires a lock that goes with this process, and returns its open file; None: another process has it."""
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def acquire_from_abandoned(lock: Path) -> int | None:
    """Acquires a keeper's lock, also from one whose manager has not spoken to it for a while: that one is killed."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (file := acquire_lock(lock)) is None and time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            holder, spoken_to = lock.read_text().split()
            is_alone = time.monotonic() - float(spoken_to) > _ALONE_SECONDS
            if is_alone and b"autovaruna.elastic.keeper" in Path(f"/proc/{holder}/cmdline").read_bytes():
                os.kill(int(holder), signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    if file is not None:
        record_word(file)
    return file


def record_word(lock: int) -> None:
    """Records in a keeper's lock which process it is, and when its manager last spoke to it, on the monotonic clock."""
    words = f"{os.getpid():10} {time.monotonic():16.2f}"
    os.pwrite(lock, words.encode(), 0)  # as long as before: memory may be full by now
