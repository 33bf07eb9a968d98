"""Writes a checkpoint: the files of each rank, from tensors anywhere, and then what makes it complete.

There is one writer. It takes the bytes of tensors (`tensor_file.lay_out`) from wherever they are: those of the model,
or a copy that `HostMemory` keeps of them, while training goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autovaruna.checkpoint import folder
from autovaruna.checkpoint.document import Json
from autovaruna.checkpoint.manifest import CHUNK_BYTES, MANIFEST, Bytes, FileRecord, Manifest, checksum
from autovaruna.checkpoint.source import INDEX, STATE
from autovaruna.checkpoint.state import Part
from autovaruna.checkpoint.tensor_file import Rows, read_header
from autovaruna.errors import CheckpointError

PER_RANK = ("optimizer_state", "generators")
"""What ``state.json`` has from every rank."""
_MARK = ".rank-"
"""What names of files begin with that ranks have in the folder of a checkpoint while they write."""
_LOCAL = "autovaruna-checkpoint-"
_UNIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Report:
    """What a rank has written.

    Attributes:
        files: its files.
        documents: its share of ``state.json``.
    """

    files: Mapping[str, FileRecord]
    documents: Mapping[str, Json]


class HostMemory:
    """Memory on the host for a copy of a rank's part; one save after the other uses it. For CUDA it is pinned."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def missing_bytes(self, part: Part) -> int:
        """Returns how much more memory a copy takes."""
        needed = _num_bytes(part)
        if len(self._memory) >= needed:
            return 0
        return 1 << (needed - 1).bit_length() if _is_on_cuda(part) else needed  # torch pins powers of two

    def copy(self, part: Part) -> dict[str, Rows]:
        """Returns the files of a part from memory that nobody changes until the next copy."""
        needed, pins = _num_bytes(part), _is_on_cuda(part)
        if len(self._memory) < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that there is no second one
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pins)
        copied: dict[str, Rows] = {}
        end = 0
        for name, rows in part.files.items():
            begin = end
            for row in rows:
                end += len(row)
                self._memory[end - len(row) : end].copy_(row, non_blocking=True)
            copied[name] = [self._memory[begin:end]]
        if pins:
            torch.cuda.synchronize()
        return copied


def _num_bytes(part: Part) -> int:
    """Returns the memory that a copy takes, with some room for a part that grows a little from save to save."""
    return -(-sum(len(row) for rows in part.files.values() for row in rows) // _UNIT_BYTES) * _UNIT_BYTES


def _is_on_cuda(part: Part) -> bool:
    return any(row.is_cuda for rows in part.files.values() for row in rows)


def write_part(part: Part, partial: Path, tempdir: str | None) -> Report:
    """Writes the files of a rank to the disk.

    Args:
        part: What it writes.
        partial: The folder where the checkpoint grows.
        tempdir: A local folder where files are written first; None: straight to `partial`.

    Raises:
        CheckpointError: a file cannot be written.
    """
    records = {}
    for name, rows in part.files.items():
        place = Path(tempdir or partial / name)
        try:
            if tempdir is None:
                records[name] = write_file(place, chunks_of(rows))
            else:
                with _local_folder(place) as local:
                    records[name] = write_file(local / name, chunks_of(rows), syncs=False)
                    place = partial / name
                    _copy_synced(local / name, place)
        except OSError as error:
            raise cannot_write(place, error) from error
    return Report(records, part.documents)


def _copy_synced(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


def write_file(path: Path, chunks: Iterable[Bytes], syncs: bool = True) -> FileRecord:
    """Writes a file chunk by chunk, and sums each on its way; it is on the disk on return, if `syncs`.

    Raises:
        OSError: it cannot be written.
    """
    size, checksums = 0, []
    with open(path, "wb") as file:
        for chunk in chunks:
            checksums.append(checksum(chunk))
            size += file.write(chunk.data)
        if syncs:
            file.flush()
            os.fsync(file.fileno())
    return FileRecord(size, tuple(checksums))


def chunks_of(rows: Rows) -> Iterator[Bytes]:
    """Yields the chunks of a file; what lies in one row on the host is not copied."""
    pieces: list[Bytes] = []
    size = 0
    for row in rows:
        begin = 0
        while begin < len(row):
            piece = row[begin : begin + CHUNK_BYTES - size].cpu().numpy()
            pieces.append(piece)
            begin, size = begin + len(piece), size + len(piece)
            if size == CHUNK_BYTES:
                yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
                pieces, size = [], 0
    if pieces:
        yield np.concatenate(pieces)


def mark_of(folder: Path, rank: int) -> Path:
    """Returns the mark of a rank that is writing; it goes when the checkpoint is complete."""
    return folder / f"{_MARK}{rank:05d}"


def commit(
    partial: Path, step: int, reports: Sequence[Report], extra_files: Mapping[str, bytes], keep: int | None
) -> Path:
    """Writes what is still missing, gives the checkpoint its name, and then removes old ones.

    Raises:
        CheckpointError: something cannot be written.
    """
    try:
        small = {INDEX: _json(_index(partial)), STATE: _json(_state(reports)), **extra_files}
        records = {name: write_file(partial / name, chunks_of([_row(data)])) for name, data in small.items()}
        for report in reports:
            records |= report.files
        write_file(partial / MANIFEST, chunks_of([_row(Manifest(step, records).to_json().encode())]))
        for mark in partial.glob(f"{_MARK}*"):
            mark.unlink()
        folder.sync_folder(partial)
        complete = folder.finish(partial, step)
        folder.remove_old(complete, keep)
        return complete
    except OSError as error:
        raise cannot_write(partial, error) from error


def _index(partial: Path) -> dict[str, Any]:
    """Returns the file of each weight, as Hugging Face's tools expect it."""
    entries = [entry for path in partial.glob("model-*") for entry in read_header(path)[0].values()]
    weight_map = {entry.name: entry.path.name for entry in entries}
    return {
        "metadata": {"total_size": sum(entry.num_bytes for entry in entries)},
        "weight_map": dict(sorted(weight_map.items())),
    }


def _state(reports: Sequence[Report]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for report in reports:
        for key, content in report.documents.items():
            if key in PER_RANK:
                state.setdefault(key, {}).update(content)
            else:
                state[key] = content
    return state


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode()


def _row(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


@contextmanager
def _local_folder(tempdir: Path) -> Iterator[Path]:
    """Makes a folder in a temporary one, and takes away those that killed jobs have left there."""
    with ExitStack() as stack:
        with folder.lock(tempdir, waits=True):
            for entry in os.scandir(tempdir):
                if entry.name.startswith(_LOCAL) and entry.is_dir():
                    folder.remove_unlocked(Path(entry.path))
            local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_LOCAL, dir=tempdir)))
            stack.enter_context(folder.lock(local))
        yield local


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Returns the error that says which file could not be written, and why."""
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}. The checkpoint is not complete and has been removed; "
        "earlier ones are as they were. Make room, or save to a folder that can be written to."
    )
