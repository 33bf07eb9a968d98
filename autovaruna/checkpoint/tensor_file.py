"""Safetensors files: lays out those that are to be written, and reads the headers of those that are there.

The format is that of https://github.com/huggingface/safetensors: the length of a header, the header in JSON, then the
bytes of each tensor, without gaps. That library checks the headers of files that are read. The bytes are moved here:
they are summed on their way to the disk, and read straight into a model's memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autovaruna.errors import CheckpointError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the dtypes that every version of it has; others are kept as their bytes."""
DTYPES = {name: dtype for dtype, name in NAMES.items()} | {"C64": torch.complex64}
NOTE = "autovaruna.dtypes"
"""Where the header notes the dtypes of tensors that are kept as bytes, as JSON by name."""
METADATA = {"format": "pt"}
"""What the library transformers wants to read in the header of a file."""

Rows = Sequence[Tensor]
"""The bytes of a file, in order: tensors of uint8 with one dimension, anywhere."""


@dataclass(frozen=True)
class Entry:
    """Where the bytes of a tensor are.

    Attributes:
        name: of the tensor.
        path: the file.
        offset: first byte of the tensor in it.
        num_bytes: how many bytes.
        dtype: the tensor's.
        shape: the tensor's.
    """

    name: str
    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor as one row; they share its memory if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def lay_out(tensors: Mapping[str, Tensor]) -> Rows:
    """Returns the bytes of a file with some tensors: its header, then each of them where it is.

    Args:
        tensors: By name, anywhere; those of the largest numbers come first, so that all are aligned.

    Raises:
        CheckpointError: a tensor's dtype is none that such a file can hold.
    """
    header: dict[str, Any] = {}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {**_described(name, tensors[name]), "data_offsets": [begin, end]}
    noted = {name: str(tensor.dtype)[6:] for name, tensor in tensors.items() if tensor.dtype not in NAMES}
    metadata = METADATA | ({NOTE: json.dumps(noted)} if noted else {})
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8).copy()
    return [torch.from_numpy(first), *(bytes_of(tensors[name]) for name in names)]


def _described(name: str, tensor: Tensor) -> dict[str, Any]:
    """Returns what the header says of a tensor, but where it is."""
    dtype = tensor.dtype
    if dtype in NAMES:
        return {"dtype": NAMES[dtype], "shape": list(tensor.shape)}
    if not (dtype.is_floating_point or dtype.is_complex):
        raise CheckpointError(
            f"{name} is of {dtype}, which checkpoints cannot hold. Expected floating point, complex numbers, or "
            f"one of {', '.join(str(each)[6:] for each in NAMES if not each.is_floating_point)}; convert it."
        )
    return {"dtype": NAMES[torch.uint8], "shape": [*tensor.shape, dtype.itemsize]}


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns where each tensor of a file is, and the metadata of its header.

    Raises:
        CheckpointError: the file is missing, cut off, or no safetensors file.
    """
    try:
        with safe_open(path, framework="np") as checked:
            metadata = dict(checked.metadata() or {})
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        noted = json.loads(metadata.get(NOTE, "{}"))
        return {name: _entry(name, path, 8 + length, its, noted.get(name)) for name, its in header.items()}, metadata
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _entry(name: str, path: Path, start: int, given: Mapping[str, Any], noted: str | None) -> Entry:
    """Returns where a tensor is, given what the header says and notes of it."""
    kept_as, shape, (begin, end) = given["dtype"], tuple(given["shape"]), given["data_offsets"]
    if kept_as not in DTYPES:
        raise ValueError(f"{name} is of dtype {kept_as!r}; expected one of {', '.join(DTYPES)}")
    dtype = DTYPES[kept_as]
    if noted is not None:
        dtype = getattr(torch, noted, None)
        if not isinstance(dtype, torch.dtype) or kept_as != NAMES[torch.uint8] or shape[-1:] != (dtype.itemsize,):
            raise ValueError(f"its header notes {noted!r} of {name}, which has {kept_as} and shape {shape}")
        shape = shape[:-1]
    return Entry(name, path, start + begin, end - begin, dtype, shape)


def can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Says whether numbers of a dtype may be read as another: floating point as any floating point, rounded."""
    return dtype == other or (dtype.is_floating_point and other.is_floating_point)
