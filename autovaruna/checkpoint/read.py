"""Reads tensors from files straight into their place, several at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autovaruna.checkpoint.manifest import num_threads
from autovaruna.checkpoint.tensor_file import Entry, bytes_of
from autovaruna.errors import CheckpointError

PIECE_BYTES = 16 << 20
"""Most bytes that are read at once; tensors that are not on the host go through as much memory of it."""


def read_all(pairs: Sequence[tuple[Entry, Tensor]]) -> None:
    """Overwrites each tensor with what its entry says, rounded to the tensor's dtype; shapes agree.

    Raises:
        CheckpointError: a file has become shorter, or cannot be read, or has several numbers for one of a tensor's.
    """
    try:
        with ExitStack() as stack, ThreadPoolExecutor(num_threads()) as pool:
            paths = {entry.path for entry, _ in pairs}
            files = {path: stack.enter_context(open(path, "rb", buffering=0)).fileno() for path in paths}
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
    """Reads tensors by name, many at a time: each has its memory at once, and its numbers when `fill` returns.

    Args:
        entries: Where they are.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._pairs: list[tuple[Entry, Tensor]] = []

    def tensor(self, name: str, place: Any = None, like: Tensor | None = None) -> Tensor:
        """Returns a tensor on the host, or `place`, if that is a tensor of this shape and dtype.

        Args:
            name: Its name.
            place: Memory for it.
            like: A tensor whose order of memory a new one of the same shape has: kernels that go through both count
                on that.
        """
        entry = self._entries[name]
        fits = isinstance(place, Tensor) and (place.shape, place.dtype) == (entry.shape, entry.dtype)
        tensor = place if fits and not place.is_meta else _empty(entry, like)
        self._pairs.append((entry, tensor))
        return tensor

    def fill(self) -> None:
        """Reads them all.

        Raises:
            CheckpointError: a file has become shorter, or cannot be read.
        """
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


def _read_piece(file: int, entry: Entry, tensor: Tensor, start: int) -> None:
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():  # other bytes, or not in one row: all at once
        if start == 0:
            _overwrite(tensor, _read_numbers(file, entry, 0, entry.num_bytes).reshape(entry.shape), entry)
        return
    count = min(PIECE_BYTES, entry.num_bytes - start)
    first, last = start // entry.dtype.itemsize, (start + count) // entry.dtype.itemsize
    target = tensor.detach().reshape(-1)[first:last]
    if tensor.device.type == "cpu" and tensor.dtype == entry.dtype:
        _read_into(file, entry, target.view(torch.uint8), start)
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


def _read_numbers(file: int, entry: Entry, start: int, count: int) -> Tensor:
    return _read_into(file, entry, torch.empty(count, dtype=torch.uint8), start).view(entry.dtype)


def _read_into(file: int, entry: Entry, target: Tensor, start: int) -> Tensor:
    view = target.numpy().data
    place = entry.offset + start
    while view:
        count = os.preadv(file, [view], place)
        if count == 0:
            raise CheckpointError(f"{entry.path} ends at byte {place}; expected more. It has been cut off.")
        view, place = view[count:], place + count
    return target
