"""Holds the sizes of memory that ranks of a host share for their messages."""

from __future__ import annotations

COPIED_BYTES = 64 << 10
"""Tensors of so many bytes are copied into the receiver's own memory when it takes them."""
MAX_BYTES = 8 << 20
"""Larger tensors go another way, and are received into memory that was posted for them."""
LENT_BYTES = 32 << 20
"""So much one rank lends another at once."""
