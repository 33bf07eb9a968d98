"""Lists the files of a complete checkpoint with their sizes and checksums."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autovaruna.checkpoint.checksum import CHUNK_BYTES, checksums_of_file, num_chunks
from autovaruna.checkpoint.descriptor import set_to_work, write_at
from autovaruna.errors import CheckpointError
from autovaruna.json_text import parse

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_DAMAGES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO, None}
"""What a file system says of a file that is lost or broken."""


class OtherFormatError(CheckpointError):
    """Says that a checkpoint, which may well be intact, is of another version of the library."""


class UnreadableError(CheckpointError):
    """Says that a checkpoint, which may well be intact, cannot be read now, or not by this user."""


def refuse_unless_damaged(path: Path, error: Exception) -> None:
    """Raises `UnreadableError` for a file that is there, but cannot be opened: an earlier one is no answer to that."""
    if isinstance(error, OSError) and error.errno not in _DAMAGES:
        raise UnreadableError(
            f"{path} cannot be read: {error.strerror}. Nothing says that it is damaged; make it readable, or load "
            "another step by its number."
        ) from error


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
                refuse_unless_damaged(folder / name, error)
                found.append(f"{folder / name} cannot be read ({error.strerror})")
                continue
            if size != record.size:
                found.append(f"{folder / name} has {size} bytes; expected {record.size}")
            else:
                intact += [(name, chunk) for chunk in range(num_chunks(size))]
        share = intact[len(intact) * rank // num_ranks : len(intact) * (rank + 1) // num_ranks]
        for name in dict.fromkeys(name for name, _ in share):
            found += self._damages_of(folder, name, [chunk for other, chunk in share if other == name])
        return found

    def _damages_of(self, folder: Path, name: str, chunks: list[int]) -> list[str]:
        expected = self.files[name].checksums
        try:
            got = checksums_of_file(folder / name, chunks)
        except (OSError, ValueError) as error:
            refuse_unless_damaged(folder / name, error)
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
        OtherFormatError: it is intact, and of another format.
        UnreadableError: it cannot be read now.
        CheckpointError: it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        content = parse(text)
        version = content["format_version"], content["chunk_bytes"]
        if version == (FORMAT_VERSION, CHUNK_BYTES):
            manifest = Manifest(content["step"], {name: _record(name, each) for name, each in content["files"].items()})
            if manifest.to_json().encode() == text:
                return manifest
    except OSError as error:
        refuse_unless_damaged(path, error)
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    if content.pop("checksum", None) == _own_checksum(content) and version != (FORMAT_VERSION, CHUNK_BYTES):
        raise OtherFormatError(
            f"{path} has format_version {version[0]} and chunk_bytes {version[1]}; expected {FORMAT_VERSION} and "
            f"{CHUNK_BYTES}. Load it with the version of autovaruna that wrote it, or load another step."
        )
    raise CheckpointError(f"{path} is damaged: it does not have the checksum that it tells of.")


def _record(name: str, given: Mapping[str, Any]) -> FileRecord:
    record = FileRecord(given["size"], tuple(given["checksums"]))
    if Path(name).name != name or len(record.checksums) != num_chunks(record.size):
        raise ValueError(f"it tells of {name!r} of {record.size} bytes with {len(record.checksums)} checksums")
    return record


def _own_checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_synced(files: Mapping[Path, bytes]) -> None:
    """Writes small files to the disk, which is asked for them when all are on their way: it syncs together what it can.

    Raises:
        OSError: one cannot be written.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(open(path, "wb", buffering=0)) for path in files]
        for file, data in zip(opened, files.values(), strict=True):
            write_at(file.fileno(), np.frombuffer(data, np.uint8), 0)
            set_to_work(file.fileno(), 0, len(data))
        for file in opened:
            os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes sure that the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
