"""Writes the files of a snapshot, a chunk at a time, with little work for the cores of the training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from autovaruna.checkpoint.checksum import CHUNK_BYTES, Bytes, checksum
from autovaruna.checkpoint.direct import DirectFile, chunk_memory
from autovaruna.checkpoint.manifest import FileRecord
from autovaruna.checkpoint.pace import Pace, give_way
from autovaruna.checkpoint.part import write_files
from autovaruna.checkpoint.snapshot import Snapshot


def write_snapshot(snapshot: Snapshot, folder: Path, tempdir: str | None, pace: Pace) -> dict[str, FileRecord]:
    """Writes the files of a snapshot to the disk.

    Raises:
        CheckpointError: a file cannot be written, or a tensor has changed before it was.
    """
    scratch = chunk_memory()

    def write(path: Path, name: str, syncs: bool) -> tuple[str, ...]:
        found: list[str] = []
        file = DirectFile(path)
        try:
            pace.run(_write_chunks(snapshot, name, file, scratch, found))
            file.finish(syncs)
        finally:
            file.close()
        return tuple(found)

    ahead = threading.Thread(target=_copy_ahead, args=(snapshot,), name="autovaruna copies")
    ahead.start()
    try:
        records = write_files(snapshot.layouts, folder, tempdir, write)
        snapshot.finish()
        return records
    finally:
        snapshot.give_up()
        ahead.join()


def _copy_ahead(snapshot: Snapshot) -> None:
    give_way()
    snapshot.copy_ahead()


def _write_chunks(
    snapshot: Snapshot, name: str, file: DirectFile, scratch: Bytes, checksums: list[str]
) -> Iterator[None]:
    """Writes a file a chunk at each turn, and notes the checksum of each."""
    layout = snapshot.layouts[name]
    for chunk in range(layout.num_chunks):
        memory = snapshot.take(name, chunk, scratch)
        count = layout.size_of(chunk)
        checksums.append(checksum(memory[:count]))
        file.write(memory, count, chunk * CHUNK_BYTES)
        if memory is not scratch:
            snapshot.give_back(memory)
        yield
