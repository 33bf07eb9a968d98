"""Writes a file past the system's cache of files, which costs the training neither copies nor memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from autovaruna.checkpoint.checksum import CHUNK_BYTES, Bytes
from autovaruna.checkpoint.descriptor import write_at

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


def chunk_memory() -> Bytes:
    """Returns memory for a chunk that a disk can read from, in huge pages where the system has them.

    A request to a disk names a few hundred places of memory. A chunk in pages of 4 KiB takes a dozen requests, each
    with an interrupt of some core that trains; in huge pages it takes one or two, and half the time.
    """
    memory = mmap.mmap(-1, CHUNK_BYTES + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + CHUNK_BYTES]


class DirectFile:
    """A new file that threads write chunk by chunk; through the cache, where the file system has no other way.

    Args:
        path: The file.
        is_direct: Whether to try that other way.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, is_direct: bool = True) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._num_bytes = 0
        self._change = threading.Lock()
        try:
            self._descriptor = os.open(path, flags | is_direct * getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = os.open(path, flags, 0o666)

    def write(self, memory: Bytes, count: int, offset: int) -> None:
        """Writes the first `count` bytes of a `chunk_memory` at the place of a chunk.

        Raises:
            OSError: it cannot be written.
        """
        whole = memory[: -(-count // PAGE_BYTES) * PAGE_BYTES]  # what is too much at the end of the file is cut off
        try:
            write_at(self._descriptor, whole, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._leave_direct()  # perhaps another thread has done so meanwhile
            write_at(self._descriptor, whole, offset)
        with self._change:
            self._num_bytes = max(self._num_bytes, offset + count)

    def finish(self, syncs: bool) -> None:
        """Gives the file its size, and makes sure that it is on the disk if wanted."""
        os.ftruncate(self._descriptor, self._num_bytes)
        if syncs:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes it."""
        os.close(self._descriptor)

    def _leave_direct(self) -> None:
        """Goes on through the cache."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
