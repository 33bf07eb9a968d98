"""Tells the folder of a job that is still saving from one that a killed job has left behind.

A job has a lock on the folder that it saves to, which the system takes away when it dies. Where a file system has no
locks, folders count as left behind.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def claim(path: Path) -> Iterator[None]:
    """Keeps a folder from counting as left behind.

    Raises:
        OSError: it is not there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing leaves it to processes that were forked meanwhile
        os.close(descriptor)


def is_claimed(path: Path) -> bool:
    """Says whether a process that lives has a claim on a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Locks an open folder; returns whether no one else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    return True
