"""Lists the files of a complete checkpoint with their sizes and checksums."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autovaruna.checkpoint.checksum import CHUNK_BYTES, checksums_of_file, num_chunks
from autovaruna.checkpoint.tensor_file import num_threads
from autovaruna.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """One file as it was written: its size, and the checksum of each chunk."""

    size: int
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that belongs to a checkpoint."""

    step: int
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """Returns the text of the file; it has a checksum of itself."""
        content = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "chunk_bytes": CHUNK_BYTES,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
        }
        return json.dumps({"checksum": _own_checksum(content), **content}, indent=1)

    def damages(self, folder: Path, rank: int = 0, num_ranks: int = 1) -> list[str]:
        """Returns what is wrong with the files in words: sizes of all, checksums of this rank's share of the chunks."""
        found = []
        intact: list[tuple[str, int]] = []
        for name, record in sorted(self.files.items()):
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                found.append(f"{folder / name} cannot be read ({error.strerror})")
                continue
            if size != record.size:
                found.append(f"{folder / name} has {size} bytes; expected {record.size}")
            else:
                intact += [(name, chunk) for chunk in range(num_chunks(size))]
        share = intact[len(intact) * rank // num_ranks : len(intact) * (rank + 1) // num_ranks]
        with ThreadPoolExecutor(num_threads()) as pool:
            for name in dict.fromkeys(name for name, _ in share):
                found += self._damages_of(folder, name, [chunk for other, chunk in share if other == name], pool)
        return found

    def _damages_of(self, folder: Path, name: str, chunks: list[int], pool: ThreadPoolExecutor) -> list[str]:
        expected = self.files[name].checksums
        try:
            got = checksums_of_file(folder / name, chunks, pool)
        except (OSError, ValueError) as error:
            return [f"{folder / name} cannot be read ({error})"]
        return [
            f"{folder / name} is damaged between byte {chunk * CHUNK_BYTES} and "
            f"{min((chunk + 1) * CHUNK_BYTES, self.files[name].size)}: its checksum is {found}, "
            f"expected {expected[chunk]}"
            for chunk, found in zip(chunks, got, strict=True)
            if found != expected[chunk]
        ]


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        known = content.pop("checksum")
        is_intact = known == _own_checksum(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    if not is_intact:
        raise CheckpointError(f"{path} is damaged: its checksum is {_own_checksum(content)}, expected {known}.")
    if content["format_version"] != FORMAT_VERSION or content["chunk_bytes"] != CHUNK_BYTES:
        raise CheckpointError(
            f"{path} has format_version {content['format_version']}; expected {FORMAT_VERSION}. Load it with the "
            "version of autovaruna that wrote it."
        )
    files = {name: FileRecord(given["size"], tuple(given["checksums"])) for name, given in content["files"].items()}
    return Manifest(content["step"], files)


def _own_checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file to the disk.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes sure that the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
