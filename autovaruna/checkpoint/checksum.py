"""Sums the bytes of files, chunk by chunk, at the speed of memory.

A CRC of every byte would take longer than reading it. So the words of a chunk are first folded: its rows of `ROW_WORDS`
integers of 64 bits are added up. The CRC-32 is that of the sum, followed by what is shorter than a row. A bit that
flips changes one word of the sum; the blocks of a disk that change places meet other words, since a row is no multiple
of them (its length is prime).
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from autovaruna.checkpoint.threads import in_threads

CHUNK_BYTES = 8 << 20
ROW_WORDS = 32_749

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def checksum(chunk: Bytes) -> str:
    """Returns the checksum of at most `CHUNK_BYTES` bytes, as eight hexadecimal digits."""
    num_rows = len(chunk) // (8 * ROW_WORDS)
    end = num_rows * 8 * ROW_WORDS
    total = np.add.reduce(chunk[:end].view("<u8").reshape(num_rows, ROW_WORDS), axis=0)  # one call: other threads run
    return f"{zlib.crc32(chunk[end:].data, zlib.crc32(total.data)):08x}"


def checksums(data: bytes) -> tuple[str, ...]:
    """Returns the checksum of each chunk of some bytes."""
    whole = np.frombuffer(data, np.uint8)
    return tuple(checksum(whole[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))


def num_chunks(size: int) -> int:
    """Returns how many chunks a file of `size` bytes has."""
    return -(-size // CHUNK_BYTES)


def checksums_of_file(path: Path, chunks: Iterable[int]) -> list[str]:
    """Returns the checksums of some chunks of a file, read in threads.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        starts = [chunk * CHUNK_BYTES for chunk in chunks]
        return in_threads(lambda start: _of_range(memory, start), starts)


def _of_range(memory: mmap.mmap, start: int) -> str:
    count = min(CHUNK_BYTES, len(memory) - start)
    found = checksum(np.frombuffer(memory, np.uint8, count, start))
    if hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, start, count)  # the pages stay cached, but no longer count as ours
    return found
