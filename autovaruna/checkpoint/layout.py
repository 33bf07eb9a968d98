"""Lays out safetensors files that are to be written: a header in JSON, then the bytes of each tensor, without gaps.

The format is that of https://github.com/huggingface/safetensors, whose library reads these files. It is written here
because every byte is summed on its way to the disk, and no second copy of the tensors is made.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autovaruna.checkpoint.checksum import CHUNK_BYTES, Bytes, num_chunks
from autovaruna.checkpoint.dtypes import KEPT_AS, NAMES, NOTE, kept
from autovaruna.errors import CheckpointError


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor as one row; they share its memory if it is contiguous."""
    if tensor.is_contiguous() and tensor.dim() and not (tensor.is_conj() or tensor.is_neg()):  # as a rule
        return tensor.detach().view(-1).view(torch.uint8)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Layout:
    """A safetensors file that is to be written.

    Attributes:
        parts: the bytes of the header and of each tensor, and where they begin.
        places: where each tensor begins, by name.
        num_bytes: the size of the file.
    """

    parts: tuple[tuple[int, Tensor], ...]
    places: Mapping[str, int]
    num_bytes: int

    @property
    def num_chunks(self) -> int:
        """How many chunks it has."""
        return num_chunks(self.num_bytes)

    def size_of(self, chunk: int) -> int:
        """Returns the bytes of a chunk."""
        return min(CHUNK_BYTES, self.num_bytes - chunk * CHUNK_BYTES)

    def fill(self, chunk: int, memory: Bytes) -> Bytes:
        """Copies a chunk to the begin of some memory; returns that part of it."""
        for place, piece in self._pieces(chunk):
            np.copyto(memory[place : place + len(piece)], piece.cpu().numpy())
        return memory[: self.size_of(chunk)]

    def _pieces(self, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """Yields what a chunk is made of, in order: places in it, and bytes."""
        start = chunk * CHUNK_BYTES
        stop = start + self.size_of(chunk)
        first = bisect_right(self.parts, start, key=lambda part: part[0]) - 1
        for begin, data in self.parts[first:]:
            if begin >= stop:
                return
            piece = data[max(0, start - begin) : stop - begin]
            if len(piece):
                yield max(0, begin - start), piece


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """Returns the layout of a file.

    Args:
        tensors: By name, anywhere; those of the largest numbers come first, so that all are aligned.
        metadata: Goes into the header.

    Raises:
        CheckpointError: a tensor's dtype is none that such a file can hold.
    """
    header: dict[str, Any] = {}
    bodies: list[tuple[int, Tensor]] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {**_described(name, tensor), "data_offsets": [begin, end]}
        bodies.append((begin, bytes_of(tensor)))
    odd = {name: str(tensor.dtype)[6:] for name, tensor in tensors.items() if tensor.dtype in KEPT_AS}
    notes = {NOTE: json.dumps(odd)} if odd else {}
    first = _header({"__metadata__": {**metadata, **notes}, **header})
    start = len(first)
    parts = [(0, torch.from_numpy(first)), *((start + begin, data) for begin, data in bodies)]
    places = {name: start + header[name]["data_offsets"][0] for name in header}
    return Layout(tuple(parts), places, start + end)


def _described(name: str, tensor: Tensor) -> dict[str, Any]:
    found = kept(tensor.dtype, tuple(tensor.shape))
    if found is None:
        raise CheckpointError(
            f"{name} is of {tensor.dtype}, which safetensors files cannot hold. Expected one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in (*NAMES, *KEPT_AS))}; convert it."
        )
    return {"dtype": found[0], "shape": list(found[1])}


def _header(content: Mapping[str, Any]) -> Bytes:
    """Returns a file's first bytes."""
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8).copy()
