"""Sums the bytes of files, chunk by chunk, at the speed of memory.

A CRC of every byte would take longer than reading it. So the words of a chunk are first folded: its rows of
`ROW_BYTES` are added up as integers of 64 bits, each one word further to the right than the row before. The CRC-32 is
that of the sum, followed by what is shorter than a row. A bit that flips changes one word of the sum; blocks that
change places meet other words, since each row has its own shift.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 8 << 20
ROW_BYTES = 256 << 10
_ROW_WORDS = ROW_BYTES // 8

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def checksum(chunk: Bytes) -> str:
    """Returns the checksum of at most `CHUNK_BYTES` bytes, as eight hexadecimal digits."""
    num_rows = len(chunk) // ROW_BYTES
    rows = chunk[: num_rows * ROW_BYTES].view("<u8").reshape(num_rows, _ROW_WORDS)
    total = np.zeros(_ROW_WORDS + num_rows, dtype="<u8")
    for shift, row in enumerate(rows):
        place = total[shift : shift + _ROW_WORDS]
        np.add(place, row, out=place)
    return f"{zlib.crc32(chunk[num_rows * ROW_BYTES :].data, zlib.crc32(total.data)):08x}"


def checksums(data: bytes) -> tuple[str, ...]:
    """Returns the checksum of each chunk of some bytes."""
    whole = np.frombuffer(data, np.uint8)
    return tuple(checksum(whole[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))


def num_chunks(size: int) -> int:
    """Returns how many chunks a file of `size` bytes has."""
    return -(-size // CHUNK_BYTES)


def checksums_of_file(path: Path, chunks: Iterable[int], pool: ThreadPoolExecutor) -> list[str]:
    """Returns the checksums of some chunks of a file, read in threads.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        starts = [chunk * CHUNK_BYTES for chunk in chunks]
        return list(pool.map(lambda start: _of_range(memory, start), starts))


def _of_range(memory: mmap.mmap, start: int) -> str:
    count = min(CHUNK_BYTES, len(memory) - start)
    found = checksum(np.frombuffer(memory, np.uint8, count, start))
    if hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, start, count)  # the pages stay cached, but no longer count as ours
    return found
