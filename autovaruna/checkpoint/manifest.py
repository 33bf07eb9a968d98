"""The manifest of a checkpoint: its files with their sizes and checksums, and a checksum of itself.

A CRC of every byte would take longer than reading it. So the words of a chunk are first folded: its rows of `ROW_WORDS`
integers of 64 bits are added up. The CRC-32 is that of the sum, followed by what is shorter than a row. A bit that
flips changes one word of the sum; the blocks of a disk that change places meet other words, since a row is no multiple
of them (its length is prime).
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autovaruna.config.files import Whole, parse, read_record, shown
from autovaruna.errors import CheckpointError

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
STATE = "state.json"
PER_RANK = ("optimizer_state", "generators")  # what ``state.json`` has from every rank
FORMAT_VERSION = 1
CHUNK_BYTES = 8 << 20
ROW_WORDS = 32_749
_DAMAGES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO, None}
"""What a file system says of a file that is lost or broken."""
_CRC_OF_NO_ROWS = zlib.crc32(bytes(8 * ROW_WORDS))

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def checksum(chunk: Bytes) -> str:
    """Returns the checksum of at most `CHUNK_BYTES` bytes, as eight hexadecimal digits."""
    num_rows = len(chunk) // (8 * ROW_WORDS)
    if not num_rows:
        return f"{zlib.crc32(chunk.data, _CRC_OF_NO_ROWS):08x}"
    end = num_rows * 8 * ROW_WORDS
    total = np.add.reduce(chunk[:end].view("<u8").reshape(num_rows, ROW_WORDS), axis=0)  # one call: other threads run
    return f"{zlib.crc32(chunk[end:].data, zlib.crc32(total.data)):08x}"


def num_chunks(size: int) -> int:
    """Returns how many chunks a file of `size` bytes has."""
    return -(-size // CHUNK_BYTES)


def num_threads() -> int:
    """Returns how many threads a rank reads and sums files with."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


class NotDamagedError(CheckpointError):
    """Says that a checkpoint, which may well be intact, cannot be read now, by this user, or by this version."""


def refuse_unless_damaged(path: Path, error: Exception) -> None:
    """Raises `NotDamagedError` for a file that is there, but cannot be opened: an earlier one is no answer to that."""
    if isinstance(error, OSError) and error.errno not in _DAMAGES:
        raise NotDamagedError(
            f"{path} cannot be read: {error.strerror}. Nothing says that it is damaged; make it readable, or load "
            "another step by its number."
        ) from error


@dataclass(frozen=True)
class FileRecord:
    """One file as it was written: its size, and the checksum of each chunk."""

    size: Whole
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that belongs to a checkpoint."""

    step: Whole
    files: Mapping[str, FileRecord]
    format_version: int = FORMAT_VERSION

    def check(self) -> None:
        """Raises ValueError if files have no names of files, or other numbers of checksums than chunks."""
        for name, record in self.files.items():
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise ValueError(f"it tells of {name!r}, which is no name of a file in its folder")
            if len(record.checksums) != num_chunks(record.size):
                raise ValueError(f"{name} has {len(record.checksums)} checksums; expected {num_chunks(record.size)}")

    def to_json(self) -> str:
        """Returns the text of the file; it has a checksum of itself."""
        content = asdict(replace(self, files=dict(sorted(self.files.items()))))
        return json.dumps({"checksum": _own_checksum(content), **content}, indent=1)

    def damages(self, folder: Path, rank: int = 0, num_ranks: int = 1) -> list[str]:
        """Returns what is wrong with the files in words: sizes of all, checksums of this rank's share of the chunks."""
        found = []
        chunks: list[tuple[str, int]] = []
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
                chunks += [(name, chunk) for chunk in range(num_chunks(size))]
        share = chunks[len(chunks) * rank // num_ranks : len(chunks) * (rank + 1) // num_ranks]
        with ThreadPoolExecutor(num_threads()) as pool:
            return found + [text for text in pool.map(lambda each: self._damage_of(folder, *each), share) if text]

    def _damage_of(self, folder: Path, name: str, chunk: int) -> str:
        """Returns in words what is wrong with a chunk; empty: nothing."""
        path, start, expected = folder / name, chunk * CHUNK_BYTES, self.files[name].checksums[chunk]
        try:
            with open(path, "rb", buffering=0) as file:
                found = checksum(np.frombuffer(os.pread(file.fileno(), CHUNK_BYTES, start), np.uint8))
        except OSError as error:
            refuse_unless_damaged(path, error)
            return f"{path} cannot be read ({error})"
        if found == expected:
            return ""
        return (
            f"{path} is damaged between byte {start} and {min(start + CHUNK_BYTES, self.files[name].size)}: its "
            f"checksum is {found}, expected {expected}"
        )


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint; CheckpointError if it is missing or damaged.

    Raises NotDamagedError if it is of another format, or cannot be read now.
    """
    path = folder / MANIFEST
    try:
        content = parse(path.read_bytes())
        claimed, version = content.pop("checksum"), content["format_version"]
        if claimed != _own_checksum(content):
            raise ValueError("it does not have the checksum that it tells of")
        if version == FORMAT_VERSION:
            manifest = read_record(content, Manifest)
            manifest.check()
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        refuse_unless_damaged(path, error)
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error!s:.300}.") from error
    raise NotDamagedError(
        f"{path} has format_version {shown(version)}; expected {FORMAT_VERSION}. Load it with the version of "
        "autovaruna that wrote it, or load another step."
    )


def _own_checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


@dataclass(frozen=True)
class WrittenPart:
    """What a rank has written of a checkpoint."""

    files: Mapping[str, FileRecord]
    weights: Mapping[str, str]  # the file of each weight among them, by name
    num_weight_bytes: int
    documents: Mapping[str, Any]  # its part of ``state.json``


def index_and_state(parts: Sequence[WrittenPart]) -> dict[str, str]:
    """Returns the texts of the index, as Hugging Face's tools expect it, and of ``state.json``, by file."""
    weights = {name: file for part in parts for name, file in part.weights.items()}
    total = {"total_size": sum(part.num_weight_bytes for part in parts)}
    state: dict[str, Any] = {}
    for part in parts:
        for key, content in part.documents.items():
            if key in PER_RANK:
                state.setdefault(key, {}).update(content)
            else:
                state[key] = content
    index = {"metadata": total, "weight_map": dict(sorted(weights.items()))}
    return {name: json.dumps(each, indent=1, allow_nan=False) for name, each in ((INDEX, index), (STATE, state))}
