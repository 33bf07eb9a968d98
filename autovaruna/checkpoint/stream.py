"""Writes the files of a snapshot in one thread, a chunk at a time, with little work for the cores of the training."""

from __future__ import annotations

from pathlib import Path

from autovaruna.checkpoint.checksum import CHUNK_BYTES, checksum
from autovaruna.checkpoint.direct import DirectFile, chunk_memory
from autovaruna.checkpoint.manifest import FileRecord
from autovaruna.checkpoint.part import write_files
from autovaruna.checkpoint.snapshot import Snapshot


def write_snapshot(snapshot: Snapshot, folder: Path, tempdir: str | None) -> dict[str, FileRecord]:
    """Writes the files of a snapshot to the disk.

    Raises:
        CheckpointError: a file cannot be written, or a tensor has changed before it was.
    """
    scratch = chunk_memory()

    def write(path: Path, name: str, syncs: bool) -> tuple[str, ...]:
        layout, found = snapshot.layouts[name], []
        file = DirectFile(path)
        try:
            for chunk in range(layout.num_chunks):
                memory = snapshot.take(name, chunk, scratch)
                count = layout.size_of(chunk)
                found.append(checksum(memory[:count]))
                file.write(memory, count, chunk * CHUNK_BYTES)
                if memory is not scratch:
                    snapshot.give_back(memory)
            file.finish(syncs)
        finally:
            file.close()
        return tuple(found)

    try:
        records = write_files(snapshot.layouts, folder, tempdir, write)
        snapshot.finish()
        return records
    finally:
        snapshot.give_up()
