"""Packs sets into rows of 64-bit words, so that numpy handles many sets at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ONE = np.uint64(1)


def pack(masks: Sequence[int], size: int) -> Words:
    """Packs masks over `size` elements into an array of shape (masks, words)."""
    num_words = max(1, -(-size // 64))
    low = (1 << 64) - 1
    rows = [[mask >> (64 * word) & low for word in range(num_words)] for mask in masks]
    return np.array(rows, dtype=np.uint64).reshape(len(masks), num_words)


def unpack(row: Words) -> int:
    """Returns the mask of one row."""
    return sum(int(word) << (64 * position) for position, word in enumerate(row))


def has(rows: Words, index: Ints, element: Ints) -> Bools:
    """Tells for each (row index, element) whether the row holds the element."""
    shift = (element & 63).astype(np.uint64)
    found: Bools = (rows[index, element >> 6] >> shift & _ONE) != 0
    return found


def byte_sums(figures: Sequence[float], num_words: int) -> Floats:
    """Sums the figures of every set of 8 neighbours, for `weigh`.

    Args:
        figures: of each element; padded with zeros to whole words.
        num_words: words of a row.

    Returns:
        The sum for byte `value` at byte position `place` of a row, shape (places, 256).
    """
    padded = np.zeros(64 * num_words)
    padded[: len(figures)] = figures
    values = np.arange(256, dtype=np.uint8).reshape(-1, 1)
    ones = np.unpackbits(values, axis=1, bitorder="little").astype(np.float64)
    sums: Floats = padded.reshape(-1, 8) @ ones.T
    return sums


def weigh(rows: Words, sums: Floats) -> Floats:
    """Sums, for each row, the figures of the elements it holds; quick where words are empty.

    Args:
        rows: shape (rows, words).
        sums: what `byte_sums` made of the figures.
    """
    total = np.zeros(len(rows))
    for word in range(rows.shape[1]):
        column = rows[:, word]
        busy = np.flatnonzero(column)
        if not len(busy):
            continue
        used = column[busy].view(np.uint8).reshape(-1, 8)
        part = np.zeros(len(busy))
        for place in range(8):
            if (table := sums[8 * word + place])[255] > 0:
                part += table[used[:, place]]
        total[busy] += part
    return total


def flatten(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Returns (offsets, items) of lists laid end to end: list i is ``items[offsets[i]:offsets[i + 1]]``."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    offsets[1:] = np.cumsum([len(items) for items in lists])
    return offsets, np.array([item for items in lists for item in items], dtype=np.int64)


def expand(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Returns (row, position) for every position in ``first[row] ... first[row] + counts[row] - 1``."""
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - np.repeat(before - first, counts)
