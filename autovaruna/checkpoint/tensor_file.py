"""Reads the headers of safetensors files; a rank then reads its own tensors straight into their place.

The format is that of https://github.com/huggingface/safetensors, whose library reads what `layout` lays out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autovaruna.checkpoint.dtypes import NOTE, original
from autovaruna.errors import CheckpointError

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
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        noted = json.loads(metadata.get(NOTE, "{}"))
        entries = {name: _entry(path, 8 + length, given, noted.get(name)) for name, given in header.items()}
        end = max((entry.offset + entry.num_bytes for entry in entries.values()), default=8 + length)
        if end != size:
            raise ValueError(f"it has {size} bytes, and its header tells of {end}")
        return entries, metadata
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _entry(path: Path, start: int, given: Mapping[str, Any], noted: str | None) -> Entry:
    begin, end = given["data_offsets"]
    dtype, shape = original(given["dtype"], tuple(given["shape"]), noted)
    entry = Entry(path, start + begin, end - begin, dtype, shape)
    if entry.num_bytes != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} and {dtype} has {entry.num_bytes} bytes")
    return entry
