"""Defines `SharedCall`: one call of the model as all ranks know it, with what each has reported of its mini-batch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from autovaruna.graph.call import CallSpec
from autovaruna.graph.key_values import KeptTensor

_NUM_NUMBERS = 64  # of a tensor that a digest is of, if it is not of all
_COMPLEX = struct.Struct("<dd")
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda value: msgspec.msgpack.Ext(0, _COMPLEX.pack(value.real, value.imag)))
Totals = list[Any]
"""Of a rank's mini-batch: a number, or nested lists of them, for each total; empty: it has no samples."""


class BatchNumbers(NamedTuple):
    """What a rank reports that may differ: of its mini-batch."""

    batch_size: int
    inputs: tuple[int, ...]  # digests of its tensors, in few calls
    totals: Totals | None  # None: the graph is not known yet
    metrics: tuple[float, ...] = ()  # what others are to show of it

    def to_bytes(self) -> bytes:
        return _ENCODER.encode(self)

    @staticmethod
    def of_bytes(data: bytes) -> BatchNumbers:
        return msgspec.msgpack.decode(
            data, type=BatchNumbers, ext_hook=lambda _, content: complex(*_COMPLEX.unpack(content))
        )


@dataclass(frozen=True)
class SharedCall:
    """One call of the model, of which every rank has its own samples."""

    call: CallSpec
    tensors: Sequence[Tensor]
    number: int
    groups: tuple[tuple[int, ...], ...]  # the ranks that pass the same mini-batch
    numbers: Sequence[BatchNumbers]  # of each rank's mini-batch

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank's mini-batch."""
        return tuple([each.batch_size for each in self.numbers])

    @property
    def global_batch_size(self) -> int:
        """Samples of all groups together."""
        return sum(self.sizes[ranks[0]] for ranks in self.groups)

    @property
    def num_tokens(self) -> int:
        """Tokens of all groups together; 0: the samples have none."""
        shapes = ((each.shape, each.dtype) for each in self.call.inputs if each.is_batch)
        return self.global_batch_size * tokens_of(shapes)

    def samples(self, start: int, size: int) -> list[Tensor]:
        """Returns this rank's tensors, the batch first in each, with some of its samples alone."""
        pairs = zip(self.tensors, self.call.inputs, strict=True)
        return [tensor[start : start + size] if spec.is_batch else tensor for tensor, spec in pairs]


def tokens_of(inputs: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
    """Returns the tokens of a sample: the length of the first input of whole numbers (batch, length); 0: none."""
    return next((shape[1] for shape, dtype in inputs if len(shape) == 2 and dtype in (torch.int64, torch.int32)), 0)


def digest(tensor: Tensor, is_whole: bool = True) -> int:
    """Returns a number that equal tensors have alike; of some of their numbers, unless it `is_whole`."""
    if isinstance(tensor, KeptTensor):
        return 0
    flat = tensor.detach().reshape(-1)
    step = 1 if is_whole else len(flat) // _NUM_NUMBERS | 1  # an odd one comes by all columns of a picture
    return crc32(flat[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes())
