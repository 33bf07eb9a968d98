"""Tells folders that a job uses from those that a killed job has left behind, or that nobody reads any more.

A job has a lock on the folder that it saves to, and another, which many may have, on the one that it loads from. The
system takes locks away when a job dies. Where a file system has no locks, folders count as left behind.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_SECONDS = 5.0


@contextmanager
def claim(path: Path) -> Iterator[None]:
    """Keeps a folder from counting as left behind.

    Raises:
        OSError: it is not there.
    """
    with _opened(path) as descriptor:
        _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def read_claim(path: Path) -> Iterator[None]:
    """Keeps a folder from being removed while it is read.

    Raises:
        FileNotFoundError: it is not there, or somebody is just removing it.
    """
    with _opened(path) as descriptor:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB) and time.monotonic() < deadline and path.exists():
            time.sleep(0.01)  # it is being removed, or has just been completed
        if not (path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor))):
            raise FileNotFoundError(f"{path} has been removed")
        yield


@contextmanager
def sole_claim(path: Path) -> Iterator[bool]:
    """Says whether nobody else has a claim on a folder; while it lasts, nobody gets one.

    Raises:
        OSError: it is not there.
    """
    with _opened(path) as descriptor:
        yield _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Waits until no other job is in this context with the same folder: it is for short acts on what is in it.

    Raises:
        OSError: it is not there.
    """
    with _opened(path) as descriptor:
        _lock(descriptor, fcntl.LOCK_EX)
        yield


def is_claimed(path: Path) -> bool:
    """Says whether a process that lives has a claim on a folder."""
    try:
        with sole_claim(path) as is_alone:
            return not is_alone
    except OSError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing leaves it to processes that were forked meanwhile
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Locks an open folder; returns False if another has it locked."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    return True
