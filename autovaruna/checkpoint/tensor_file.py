"""Reads the headers of safetensors files; a rank then reads its own tensors straight into their place.

The format is that of https://github.com/huggingface/safetensors, whose library reads what `layout` lays out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autovaruna.checkpoint.dtypes import NOTE, original
from autovaruna.errors import CheckpointError
from autovaruna.json_text import parse

_MAX_HEADER_BYTES = 1 << 30


@dataclass(frozen=True)
class Entry:
    """Where the bytes of a tensor are.

    Attributes:
        path: the file.
        offset: first byte of the tensor in it.
        num_bytes: how many bytes.
        dtype: the tensor's.
        shape: the tensor's.
    """

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns where each tensor of a file is, and the metadata of its header.

    Raises:
        CheckpointError: the file is missing, cut off, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header says that it has {length} bytes, of {size}")
            header = _texts(parse(file.read(length)), "its header")
        metadata = _texts(header.pop("__metadata__", None) or {}, "its metadata", str)
        noted = _texts(parse(metadata.get(NOTE, "{}")), f"{NOTE} in its metadata", str)
        entries = {name: _entry(path, 8 + length, name, given, noted.get(name)) for name, given in header.items()}
        _check_places(entries, 8 + length, size)
        return entries, metadata
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _texts(given: Any, what: str, kind: type = object) -> dict[str, Any]:
    """Returns an object of JSON whose values are of a kind."""
    if not isinstance(given, dict) or not all(isinstance(value, kind) for value in given.values()):
        raise ValueError(f"{what} is {given!r:.80}; expected an object{' of texts' if kind is str else ''}")
    return given


def _entry(path: Path, start: int, name: str, given: Any, noted: str | None) -> Entry:
    match given:
        case {"dtype": str(kept_as), "shape": [*sizes], "data_offsets": [begin, end]}:
            are_counts = all(type(number) is int and number >= 0 for number in (*sizes, begin, end))
        case _:
            are_counts = False
    if not are_counts:
        raise ValueError(f"it says of {name}: {given!r:.120}; expected dtype, shape and data_offsets")
    dtype, shape = original(kept_as, tuple(sizes), noted)
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}, of shape {shape} and {dtype}, has {end - begin} bytes")
    return Entry(path, start + begin, end - begin, dtype, shape)


def _check_places(entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Makes sure that the tensors follow each other, and fill the file."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != start:
            raise ValueError(f"{name} begins at byte {entry.offset}; expected {start}")
        start += entry.num_bytes
    if start != size:
        raise ValueError(f"it has {size} bytes, and its header tells of {start}")
