"""Writes a file whose bytes stay what they are meanwhile: two threads sum and write, and the disk works beside them."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from autovaruna.checkpoint.checksum import CHUNK_BYTES, Bytes, checksum
from autovaruna.checkpoint.layout import Layout

_NUM_THREADS = 2
_SYNC_FILE_RANGE_WRITE = 2


def write(path: Path, layout: Layout, syncs: bool = True) -> tuple[str, ...]:
    """Writes a file, and returns the checksum of each of its chunks.

    Args:
        path: The file.
        layout: What is in it.
        syncs: Whether it must be on the disk before this returns.

    Raises:
        OSError: it cannot be written.
    """
    scratch = threading.local()

    def write_chunk(chunk: int) -> str:
        data = layout.view(chunk)
        if data is None:
            if not hasattr(scratch, "memory"):
                scratch.memory = np.empty(CHUNK_BYTES, np.uint8)
            data = layout.fill(chunk, scratch.memory)
        write_at(descriptor, data, chunk * CHUNK_BYTES)
        if syncs:
            set_to_work(descriptor, chunk * CHUNK_BYTES, len(data))
        return checksum(data)

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            found = tuple(pool.map(write_chunk, range(layout.num_chunks)))
        if syncs:
            os.fsync(descriptor)
        return found
    finally:
        os.close(descriptor)


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
