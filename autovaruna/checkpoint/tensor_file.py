"""Safetensors files: lays out those that are to be written, and reads those that are there, several tensors at a time.

The format is that of https://github.com/huggingface/safetensors: the length of a header, the header in JSON, then the
bytes of each tensor, without gaps. That library checks the headers of files that are read. The bytes are moved here:
they are summed on their way to the disk, and read straight into a model's memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autovaruna.checkpoint.manifest import Bytes, num_threads
from autovaruna.checkpoint.remote_file import ReadInto, is_elsewhere, open_bytes
from autovaruna.config.files import parse, shown
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
}  # what safetensors calls the dtypes that every version of it has; others are kept as their bytes
DTYPES = {name: dtype for dtype, name in NAMES.items()} | {"C64": torch.complex64}
NOTE = "autovaruna.dtypes"  # where the header notes the dtypes of tensors that are kept as bytes, as JSON by name
METADATA = {"format": "pt"}  # what the library transformers wants to read in the header of a file

PIECE_BYTES = 16 << 20
"""Most bytes that are read at once; tensors that are not on the host go through as much memory of it."""

Rows = Sequence[Tensor]  # the bytes of a file, in order: tensors of uint8 with one dimension, anywhere


@dataclass(frozen=True)
class Entry:
    """Where the bytes of a tensor are."""

    name: str
    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor as one row; they share its memory if it is contiguous."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.reshape(-1).view(torch.uint8)


def lay_out(tensors: Mapping[str, Tensor]) -> Rows:
    """Returns the bytes of a file with some tensors: its header, then each of them where it is.

    Those of the largest numbers come first, so that all are aligned. Raises CheckpointError for a dtype that such a
    file cannot hold.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header(tuple((name, tensors[name].dtype, tensors[name].shape) for name in names))
    return [torch.from_numpy(header), *(bytes_of(tensors[name]) for name in names)]


@lru_cache(maxsize=8)  # snapshots in memory have the same header again and again
def _header(described: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Bytes:
    """Returns the bytes before those of tensors, which have a name, a dtype and a shape each."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in described:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {**_described(name, dtype, shape), "data_offsets": [begin, end]}
    noted = {name: str(dtype)[6:] for name, dtype, _ in described if dtype not in NAMES}
    metadata = METADATA | ({NOTE: json.dumps(noted)} if noted else {})
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return np.array(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))


def _described(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns what the header says of a tensor, but where it is."""
    if dtype in NAMES:
        return {"dtype": NAMES[dtype], "shape": list(shape)}
    if not (dtype.is_floating_point or dtype.is_complex):
        raise CheckpointError(
            f"{name} is of {dtype}, which checkpoints cannot hold. Expected floating point, complex numbers, or "
            f"one of {', '.join(str(each)[6:] for each in NAMES if not each.is_floating_point)}; convert it."
        )
    return {"dtype": NAMES[torch.uint8], "shape": [*shape, dtype.itemsize]}


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns where each tensor of a file is, and its header's metadata; CheckpointError if it is no such file."""
    try:
        if not is_elsewhere(path):  # else its host has compared its checksums
            with safe_open(path, framework="np"):
                pass
        with open_bytes(path) as file:
            length = int.from_bytes(_read(file, path, 0, 8), "little")
            header = parse(_read(file, path, 8, length))
        metadata = dict(header.pop("__metadata__", None) or {})
        noted = parse(metadata.get(NOTE, "{}"))
        return {name: _entry(name, path, 8 + length, its, noted.get(name)) for name, its in header.items()}, metadata
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _entry(name: str, path: Path, start: int, given: Mapping[str, Any], noted: str | None) -> Entry:
    """Returns where a tensor is, given what the header says and notes of it."""
    kept_as, shape, (begin, end) = given["dtype"], tuple(given["shape"]), given["data_offsets"]
    if kept_as not in DTYPES:
        raise ValueError(f"{name} is of dtype {kept_as!r}; expected one of {', '.join(DTYPES)}")
    dtype = DTYPES[kept_as] if noted is None else dtype_of(noted)
    if noted is not None:
        if kept_as != NAMES[torch.uint8] or shape[-1:] != (dtype.itemsize,):
            raise ValueError(f"its header notes {noted!r} of {name}, which has {kept_as} and shape {shape}")
        shape = shape[:-1]
    return Entry(name, path, start + begin, end - begin, dtype, shape)


def dtype_of(name: Any) -> torch.dtype:
    """Returns the dtype of a name, as ``float32``; ValueError if there is none."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{shown(name)} is no dtype of torch")
    return found


def can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Says whether numbers of a dtype may be read as another: floating point as any floating point, rounded."""
    return dtype == other or (dtype.is_floating_point and other.is_floating_point)


def read_all(pairs: Sequence[tuple[Entry, Tensor]]) -> None:
    """Overwrites each tensor with what its entry says, rounded to the tensor's dtype; shapes agree.

    Raises CheckpointError if a file has become shorter, or cannot be read, or has several numbers for one of a
    tensor's.
    """
    try:
        with ExitStack() as stack, ThreadPoolExecutor(num_threads()) as pool:
            paths = {entry.path for entry, _ in pairs}
            files = {path: stack.enter_context(open_bytes(path)) for path in paths}
            reads = [
                pool.submit(_read_piece, files[entry.path], entry, tensor, start)
                for entry, tensor in pairs
                for start in range(0, entry.num_bytes, PIECE_BYTES)
            ]
            for read in reads:
                read.result()
    except OSError as error:
        raise CheckpointError(f"a checkpoint cannot be read: {error}") from error
    with torch.no_grad():
        torch.autograd.graph.increment_version([tensor for _, tensor in pairs if not tensor.is_inference()])


class Reader:
    """Reads tensors by name, many at a time: each has its memory at once, and its numbers when `fill` returns."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._pairs: list[tuple[Entry, Tensor]] = []

    def tensor(self, name: str, place: Any = None, like: Tensor | None = None) -> Tensor:
        """Returns a tensor on the host, or `place` if that fits; a new one in the order of memory of `like`."""
        entry = self._entries[name]
        fits = isinstance(place, Tensor) and (place.shape, place.dtype) == (entry.shape, entry.dtype)
        tensor = place if fits and not place.is_meta else _empty(entry, like)
        self._pairs.append((entry, tensor))
        return tensor

    def fill(self) -> None:
        """Reads them all."""
        pairs, self._pairs = self._pairs, []
        read_all(pairs)


def read_new(entry: Entry) -> Tensor:
    """Returns a tensor on the host with what an entry says."""
    tensor = _empty(entry)
    read_all([(entry, tensor)])
    return tensor


def _empty(entry: Entry, like: Tensor | None = None) -> Tensor:
    if like is None or like.shape != entry.shape:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.empty_like(like, dtype=entry.dtype, device="cpu", requires_grad=False)


def _read_piece(file: ReadInto, entry: Entry, tensor: Tensor, start: int) -> None:
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():  # other bytes, or not in one row: all at once
        if start == 0:
            _overwrite(tensor, _read_numbers(file, entry, 0, entry.num_bytes).reshape(entry.shape), entry)
        return
    count = min(PIECE_BYTES, entry.num_bytes - start)
    first, last = start // entry.dtype.itemsize, (start + count) // entry.dtype.itemsize
    target = tensor.detach().reshape(-1)[first:last]
    if tensor.device.type == "cpu" and tensor.dtype == entry.dtype:
        _fill(file, entry.path, target.view(torch.uint8).numpy().data, entry.offset + start)
    else:
        target.copy_(_read_numbers(file, entry, start, count))


def _overwrite(tensor: Tensor, numbers: Tensor, entry: Entry) -> None:
    """Overwrites a tensor in whatever order it lies; where strides are 0, as expand() makes them, several are one."""
    first = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
    if 0 in tensor.stride() and not bytes_of(numbers[first].expand_as(numbers)).equal(bytes_of(numbers)):
        raise CheckpointError(
            f"{entry.name} in {entry.path} has different numbers for what is one number in the model: got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}, as expand() makes it. Expected one with memory "
            "for each number: call .clone() where the model makes it."
        )
    tensor.detach()[first].copy_(numbers[first])


def _read_numbers(file: ReadInto, entry: Entry, start: int, count: int) -> Tensor:
    numbers = torch.empty(count, dtype=torch.uint8)
    _fill(file, entry.path, numbers.numpy().data, entry.offset + start)
    return numbers.view(entry.dtype)


def _read(file: ReadInto, path: Path, place: int, count: int) -> bytes:
    data = bytearray(count)
    _fill(file, path, memoryview(data), place)
    return bytes(data)


def _fill(file: ReadInto, path: Path, view: memoryview, place: int) -> None:
    while view:
        count = file(view, place)
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {place}; expected more. It has been cut off.")
        view, place = view[count:], place + count
