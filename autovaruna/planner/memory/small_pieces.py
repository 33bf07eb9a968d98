"""Defines the small pieces that a block takes from the heap beside its tensors.

A node of autograd, with what describes its tensors, is some 15 pieces of 16 to 500 bytes in any model, half of them of
16 to 24. Those that stay keep tensors out of the holes that they lie in; those that go leave room for the next ones.
Their order decides by chance which holes that are, and with that up to a tenth of the heap: there are several orders,
none of them right, and the median of what comes out is what counts.
"""

from __future__ import annotations

Pieces = tuple[tuple[int, bool], ...]
"""Bytes of each piece, and whether it stays until the backward of its block."""

_BEFORE: Pieces = ((16, False), (16, True), (16, False), (176, True), (96, False))
_AFTER: Pieces = ((16, False), (16, True), (480, False), (96, True), (16, False))
PATTERNS: tuple[tuple[Pieces, Pieces], ...] = ((_BEFORE, _AFTER), (_BEFORE[::-1], _AFTER[::-1]), (_AFTER, _BEFORE))
"""Pieces that come before and after the tensors of a block."""
