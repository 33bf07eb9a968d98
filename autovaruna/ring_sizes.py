"""Sizes of the rings through which ranks of one host exchange messages; the planner counts their memory."""

COPIED_BYTES = 64 << 10
"""Tensors of so many bytes are copied into the receiver's own memory when it takes them."""
MAX_BYTES = 8 << 20
"""Larger tensors go another way, and are received into memory that was posted for them."""
LENT_BYTES = 32 << 20
"""So much one rank lends another at once."""


def is_lent(num_bytes: float) -> bool:
    """Returns whether a tensor that comes from another rank of the host lies in memory that both see."""
    return COPIED_BYTES < num_bytes <= MAX_BYTES
