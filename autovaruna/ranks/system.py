"""Asks the system for what a Python that was built for an older one, as conda's is, lacks in `os`."""

from __future__ import annotations

import ctypes
import os

_CLOSED_ON_EXEC = 1
_PIDFD_OPEN = 434  # the number of the call, on Linux


def memory_file(name: str) -> int:
    """Returns a new file in memory, which no folder has; OSError if it cannot be made."""
    make = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", lambda *_: -1)
    return _checked(make(name.encode(), _CLOSED_ON_EXEC))


def process_file(process: int) -> int:
    """Returns a file that can be read once a process has ended; OSError if it has, or the system is too old."""
    return _checked(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, process, 0))


def _checked(file: int) -> int:
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file
