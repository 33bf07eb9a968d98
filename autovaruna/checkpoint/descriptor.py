"""Writes to open files."""

from __future__ import annotations

import ctypes
import os

from autovaruna.checkpoint.checksum import Bytes

_SYNC_FILE_RANGE_WRITE = 2


def write_at(descriptor: int, data: Bytes, offset: int) -> None:
    """Writes all of `data` at a place of an open file."""
    view = data.data
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def set_to_work(descriptor: int, start: int, count: int) -> None:
    """Lets the disk begin with a part of a file, where the system can; whether it is there, fsync says."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, start, count, _SYNC_FILE_RANGE_WRITE)
