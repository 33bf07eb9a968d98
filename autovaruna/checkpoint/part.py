"""Writes one rank's part of a checkpoint: its files, and what it has to say about them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from autovaruna.checkpoint.document import Json
from autovaruna.checkpoint.manifest import FileRecord
from autovaruna.checkpoint.tensor_file import lay_out, write
from autovaruna.errors import CheckpointError

METADATA = {"format": "pt"}
"""What the library transformers wants to read in the header of a file."""


@dataclass(frozen=True)
class Part:
    """What one rank writes.

    Attributes:
        weights: tensors of the model, by name.
        others: all other tensors.
        documents: this rank's share of ``state.json``.
        weight_file: name of the file for `weights`.
        other_file: name of the file for `others`.
    """

    weights: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    documents: Mapping[str, Json]
    weight_file: str
    other_file: str

    def files(self) -> dict[str, Mapping[str, Tensor]]:
        """Returns the files that this rank writes, by name; none without tensors."""
        every = {self.weight_file: self.weights, self.other_file: self.others}
        return {name: tensors for name, tensors in every.items() if tensors}


@dataclass(frozen=True)
class Report:
    """What a rank has written.

    Attributes:
        files: its files.
        weight_map: the file of each of its weights.
        num_bytes: bytes of its weights.
        documents: its share of ``state.json``.
    """

    files: Mapping[str, FileRecord]
    weight_map: Mapping[str, str]
    num_bytes: int
    documents: Mapping[str, Json] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return asdict(self)

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> Report:
        """Returns what `to_json` made JSON of."""
        files = {
            name: FileRecord(record["size"], tuple(record["checksums"])) for name, record in given["files"].items()
        }
        return Report(files, given["weight_map"], given["num_bytes"], given["documents"])


def write_part(part: Part, folder: Path, tempdir: str | None, in_background: bool = False) -> Report:
    """Writes the files of a rank to the disk.

    Args:
        part: What it writes.
        folder: Where the checkpoint grows.
        tempdir: A local folder where files are written first; None: straight to `folder`.
        in_background: Whether this thread does it all.

    Raises:
        CheckpointError: a file cannot be written.
    """
    records = {}
    for name, tensors in part.files().items():
        try:
            records[name] = _write_file(folder / name, tensors, tempdir, in_background)
        except OSError as error:
            raise cannot_write(folder / name, error) from error
    return Report(
        records,
        dict.fromkeys(part.weights, part.weight_file),
        sum(tensor.numel() * tensor.element_size() for tensor in part.weights.values()),
        part.documents,
    )


def _write_file(path: Path, tensors: Mapping[str, Tensor], tempdir: str | None, in_background: bool) -> FileRecord:
    layout = lay_out(tensors, METADATA)
    if tempdir is None:
        return FileRecord(layout.num_bytes, write(path, layout, in_background=in_background))
    with tempfile.TemporaryDirectory(prefix="autovaruna-", dir=tempdir) as local:
        checksums = write(Path(local) / path.name, layout, False, in_background)
        shutil.copyfile(Path(local) / path.name, path)
        with open(path, "rb+") as copied:
            os.fsync(copied.fileno())
    return FileRecord(layout.num_bytes, checksums)


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Returns the error that says which file could not be written, and why."""
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}. The checkpoint is not complete and has been removed; "
        "earlier ones are as they were. Make room, or save to a folder that can be written to."
    )
