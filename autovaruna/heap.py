"""Has the C library keep the memory that a step frees, and give it back when something else has run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = 1, -1, -3
_MAPPED_BYTES = 32 << 20
"""Tensors of this and more lie outside the heap, and go back to the system at once; the most that glibc allows."""
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.mmap_max")
"""A user who sets one of these in ``GLIBC_TUNABLES`` has decided what is given back, and is followed."""


def keep_freed_memory() -> None:
    """Lets the C library keep what tensors free, unless the user has set that.

    Giving it back and getting it again takes up to a sixth of a step. Small pieces join their free neighbours at once:
    those that wait to be used again keep tensors out of the holes beside them.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = any(name.startswith("MALLOC_") for name in os.environ) or any(name in tunables for name in _TUNABLES)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not is_set:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MXFAST, 0)


def give_back_freed_memory() -> None:
    """Gives what has been freed back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def other_sizes() -> Iterator[None]:
    """Runs what makes tensors of other sizes than the steps around it, and leaves no holes among theirs."""
    give_back_freed_memory()
    try:
        yield
    finally:
        give_back_freed_memory()
