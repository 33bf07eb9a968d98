"""Writes one rank's part of a checkpoint: its files, and what it has to say about them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from autovaruna.checkpoint.claim import claim, in_turn, is_claimed
from autovaruna.checkpoint.document import Json
from autovaruna.checkpoint.layout import Layout, lay_out
from autovaruna.checkpoint.manifest import FileRecord
from autovaruna.checkpoint.write import write
from autovaruna.errors import CheckpointError

_LOCAL = "autovaruna-checkpoint-"
Write = Callable[[Path, str, bool], tuple[str, ...]]
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


def report_of(part: Part, records: Mapping[str, FileRecord]) -> Report:
    """Returns what a rank says when its files are written."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in part.weights.values())
    return Report(records, dict.fromkeys(part.weights, part.weight_file), num_bytes, part.documents)


def write_part(part: Part, folder: Path, tempdir: str | None) -> Report:
    """Writes the files of a rank to the disk.

    Args:
        part: What it writes.
        folder: Where the checkpoint grows.
        tempdir: A local folder where files are written first; None: straight to `folder`.

    Raises:
        CheckpointError: a file cannot be written.
    """
    layouts = {name: lay_out(tensors, METADATA) for name, tensors in part.files().items()}
    return report_of(
        part, write_files(layouts, folder, tempdir, lambda path, name, syncs: write(path, layouts[name], syncs))
    )


def write_files(
    layouts: Mapping[str, Layout], folder: Path, tempdir: str | None, write: Write
) -> dict[str, FileRecord]:
    """Writes files, one after the other, and returns what they are.

    Args:
        layouts: The files, by name.
        folder: Where the checkpoint grows.
        tempdir: A local folder where files are written first; None: straight to `folder`.
        write: Writes a file, given where, its name, and whether it must be on the disk; returns its checksums.

    Raises:
        CheckpointError: a file cannot be written.
    """
    records = {}
    for name, layout in layouts.items():
        try:
            records[name] = FileRecord(layout.num_bytes, _write_file(folder / name, tempdir, write))
        except OSError as error:
            raise cannot_write(folder / name, error) from error
    return records


def _write_file(path: Path, tempdir: str | None, write: Write) -> tuple[str, ...]:
    if tempdir is None:
        return write(path, path.name, True)
    place = Path(tempdir)
    try:
        with _local_folder(place) as local:
            checksums = write(local / path.name, path.name, False)
            place = path
            shutil.copyfile(local / path.name, path)
            with open(path, "rb+") as copied:
                os.fsync(copied.fileno())
    except OSError as error:
        raise cannot_write(place, error) from error
    return checksums


@contextmanager
def _local_folder(tempdir: Path) -> Iterator[Path]:
    """Makes a folder in a temporary one, and takes away those that killed jobs have left there."""
    with ExitStack() as stack:
        with in_turn(tempdir):
            for entry in os.scandir(tempdir):
                if entry.name.startswith(_LOCAL) and entry.is_dir() and not is_claimed(Path(entry.path)):
                    shutil.rmtree(entry.path, ignore_errors=True)
            local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_LOCAL, dir=tempdir)))
            stack.enter_context(claim(local))
        yield local


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Returns the error that says which file could not be written, and why."""
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}. The checkpoint is not complete and has been removed; "
        "earlier ones are as they were. Make room, or save to a folder that can be written to."
    )
