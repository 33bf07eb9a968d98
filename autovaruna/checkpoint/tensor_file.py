"""Lays out, writes and reads safetensors files: a header in JSON, then the bytes of each tensor, without gaps.

The format is that of https://github.com/huggingface/safetensors, whose library reads these files. It is written here
because every byte is summed on its way to the disk, in threads, and no second copy of the tensors is made; and it is
read here because a rank reads its own tensors straight into their place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autovaruna.checkpoint.checksum import CHUNK_BYTES, Bytes, checksum, num_chunks
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
    torch.complex64: "C64",
}
"""What safetensors calls the dtypes that it has."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
_MAX_HEADER_BYTES = 1 << 30
FLUSH_CHUNKS = 8
"""After so many chunks the disk is set to work, beside those that follow."""


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


def num_threads() -> int:
    """Returns how many threads a rank reads and sums files with."""
    return max(2, min(8, torch.get_num_threads()))


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor as one row; they share its memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Layout:
    """A safetensors file that is to be written: the bytes of its header, and of each tensor where it begins."""

    parts: tuple[tuple[int, Tensor], ...]
    num_bytes: int

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yields what lies between two places of the file, in order: places relative to `start`, and bytes."""
        for begin, data in self._parts_from(start):
            if begin >= stop:
                return
            piece = data[max(0, start - begin) : stop - begin]
            if len(piece):
                yield max(0, begin - start), piece

    def _parts_from(self, start: int) -> Iterator[tuple[int, Tensor]]:
        low, high = 0, len(self.parts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.parts[middle][0] <= start else (low, middle)
        yield from self.parts[low:]


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """Returns the layout of a file.

    Args:
        tensors: By name, anywhere; those of the largest numbers come first, so that all are aligned.
        metadata: Goes into the header.

    Raises:
        CheckpointError: a tensor's dtype is none that safetensors has.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    bodies: list[tuple[int, Tensor]] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name} is of {tensor.dtype}, which safetensors files cannot hold. Expected one of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in NAMES)}; convert it."
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        bodies.append((begin, bytes_of(tensor)))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    start = len(first)
    parts = [(0, torch.from_numpy(first.copy())), *((start + begin, data) for begin, data in bodies)]
    return Layout(tuple(parts), start + end)


def write(path: Path, layout: Layout, syncs: bool = True, in_background: bool = False) -> tuple[str, ...]:
    """Writes a file, and returns the checksum of each of its chunks.

    Args:
        path: The file.
        layout: What is in it.
        syncs: Whether it must be on the disk before this returns.
        in_background: Whether this thread does it all: at the end of a program no other can be started, and before
            it the cores are the training's.

    Raises:
        OSError: it cannot be written.
    """
    scratch = local()

    def write_chunk(chunk: int) -> str:
        if not hasattr(scratch, "memory"):
            scratch.memory = np.empty(CHUNK_BYTES, np.uint8)
        start = chunk * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, layout.num_bytes)
        data: Bytes = scratch.memory[: stop - start]
        for place, piece in layout.pieces(start, stop):
            np.copyto(data[place : place + len(piece)], piece.cpu().numpy())
        found = checksum(data)
        write_at(descriptor, data, start)
        return found

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        chunks = range(num_chunks(layout.num_bytes))
        found = list(map(write_chunk, chunks)) if in_background else _in_threads(write_chunk, chunks, descriptor)
        if syncs:
            os.fsync(descriptor)
        return tuple(found)
    finally:
        os.close(descriptor)


def _in_threads(write_chunk: Callable[[int], str], chunks: Sequence[int], descriptor: int) -> list[str]:
    """Writes chunks in threads, while another one brings those before them to the disk; returns their checksums."""
    found = []
    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(1) as flusher:
        flushes = []
        for chunk, own in enumerate(pool.map(write_chunk, chunks), 1):
            found.append(own)
            if chunk % FLUSH_CHUNKS == 0:
                flushes.append(flusher.submit(os.fdatasync, descriptor))
        for flush in flushes:
            flush.result()  # the system tells of an error of the disk once, to whoever asks first
    return found


def write_at(descriptor: int, data: Bytes, offset: int) -> None:
    """Writes all of `data` at a place of an open file."""
    view = data.data
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


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
        entries = {name: _entry(path, 8 + length, given) for name, given in header.items()}
        end = max((entry.offset + entry.num_bytes for entry in entries.values()), default=8 + length)
        if end != size:
            raise ValueError(f"it has {size} bytes, and its header tells of {end}")
        return entries, metadata
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error


def _entry(path: Path, start: int, given: Mapping[str, Any]) -> Entry:
    begin, end = given["data_offsets"]
    dtype, shape = DTYPES[given["dtype"]], tuple(given["shape"])
    entry = Entry(path, start + begin, end - begin, dtype, shape)
    if entry.num_bytes != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} and {dtype} has {entry.num_bytes} bytes")
    return entry
