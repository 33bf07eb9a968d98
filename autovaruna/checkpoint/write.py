"""Writes a file whose bytes stay what they are meanwhile: two threads copy, sum and write, the disk works beside them.

What must be on the disk goes past the system's cache of files: copies into it, and writing it out, take three times as
long, and four times the processor.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autovaruna.checkpoint.checksum import CHUNK_BYTES, checksum
from autovaruna.checkpoint.direct import DirectFile, chunk_memory
from autovaruna.checkpoint.layout import Layout

_NUM_THREADS = 2


def write(path: Path, layout: Layout, syncs: bool = True) -> tuple[str, ...]:
    """Writes a file, and returns the checksum of each of its chunks.

    Args:
        path: The file.
        layout: What is in it.
        syncs: Whether it must be on the disk before this returns; else it stays in the cache.

    Raises:
        OSError: it cannot be written.
    """
    scratch = threading.local()

    def write_chunk(chunk: int) -> str:
        if not hasattr(scratch, "memory"):
            scratch.memory = chunk_memory()
        data = layout.fill(chunk, scratch.memory)
        file.write(scratch.memory, len(data), chunk * CHUNK_BYTES)
        return checksum(data)

    file = DirectFile(path, is_direct=syncs)
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            found = tuple(pool.map(write_chunk, range(layout.num_chunks)))
        file.finish(syncs)
        return found
    finally:
        file.close()
