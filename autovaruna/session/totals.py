"""Turns the totals of a mini-batch, which ranks tell each other at each call, into bytes and back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

Totals = list[Any]
"""Of a rank's mini-batch: a number, or nested lists of them, for each total; empty: it has no samples."""

_NUM_WORDS = struct.Struct("=q")
_KINDS = np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.complex128)


def pack_totals(totals: Totals) -> bytes:
    """Returns what each total is, and then its numbers: eight bytes each, sixteen of a complex one."""
    words, numbers = list[int](), list[bytes]()
    for total in totals:
        values = np.asarray(total)
        kind = 0 if values.dtype.kind in "biu" else 1 if values.dtype.kind == "f" else 2
        words += kind, values.ndim, *values.shape
        numbers.append(values.astype(_KINDS[kind]).tobytes())
    return _NUM_WORDS.pack(len(words)) + np.array(words, np.int64).tobytes() + b"".join(numbers)


def unpack_totals(data: bytes) -> Totals:
    end = _NUM_WORDS.size + 8 * _NUM_WORDS.unpack_from(data)[0]
    layout, place, totals = _layout(data[_NUM_WORDS.size : end]), end, list[Any]()
    for dtype, shape in layout:
        count = prod(shape)
        totals.append(np.frombuffer(data, dtype, count, place).reshape(shape).tolist())
        place += count * dtype.itemsize
    return totals


@lru_cache(maxsize=64)
def _layout(head: bytes) -> Sequence[tuple[np.dtype[Any], tuple[int, ...]]]:
    """Returns dtype and shape of each total."""
    words, layout = list(np.frombuffer(head, np.int64).tolist()), []
    while words:
        (kind, num_dims), words = words[:2], words[2:]
        layout.append((_KINDS[kind], tuple(words[:num_dims])))
        words = words[num_dims:]
    return layout
