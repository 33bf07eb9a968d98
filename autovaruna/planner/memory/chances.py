"""Defines `Chance`: what nobody knows of a heap and of a block, but what decides which holes there will be.

A node of autograd, with what describes its tensors, is some 15 pieces of 16 to 500 bytes in any model, half of them of
16 to 24. Those that stay keep tensors out of the holes that they lie in; those that go leave room for the next ones.
Their order decides by chance which holes that are, and with that up to a tenth of the heap.

Before a backward starts, autograd's engine lists all the nodes that it will go through, a piece of 16 bytes each, which
stays until the last of them has run. They are taken where the heap is fullest, and part what then becomes free. Whether
there are two for a block or eight is the same.

When steps begin, the heap is not empty, either. What tracing and measuring have freed lies in three to eight areas of
half a MiB to some 50, whose pages the system has taken back; between them is what stays. Tensors go there first.

There are several chances, none of them right, and the median of what comes out is what counts.
"""

from __future__ import annotations

from dataclasses import dataclass

Pieces = tuple[tuple[int, bool], ...]
"""Bytes of each piece, and whether it stays until the backward of its block."""

_BEFORE: Pieces = ((16, False), (16, True), (16, False), (176, True), (96, False))
_AFTER: Pieces = ((16, False), (16, True), (480, False), (96, True), (16, False))
LISTED: Pieces = ((16, True),) * 4
"""Pieces that a backward takes for each block before it starts."""


@dataclass(frozen=True)
class Chance:
    """Small pieces, and free areas.

    Attributes:
        before, after: what a block takes from the heap before and after its tensors.
        free_bytes: of each area that is free, and untouched, when the first step begins.
    """

    before: Pieces = _BEFORE
    after: Pieces = _AFTER
    free_bytes: tuple[int, ...] = ()


def _areas(*mib: float) -> tuple[int, ...]:
    return tuple(int(each * 2**20) for each in mib)


CHANCES = (
    Chance(_BEFORE, _AFTER, _areas(0.5, 1, 1, 5, 10)),
    Chance(_BEFORE[::-1], _AFTER[::-1], _areas(1, 3, 30)),
    Chance(_AFTER, _BEFORE, _areas(1, 4, 8)),
)
"""Areas like those that eight processes had."""
