"""Knows whether modules that are kept whole run to train, or on copies, when only time and memory count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_on_this_thread = local()


def is_profiling() -> bool:
    """Whether only time and memory count on this thread."""
    return bool(getattr(_on_this_thread, "is_rehearsal", False))


@contextmanager
def profiling_mode() -> Iterator[None]:
    """Lets copies stand in for modules that are kept whole, so that what is measured leaves no trace in the model."""
    before = is_profiling()
    _on_this_thread.is_rehearsal = True
    try:
        yield
    finally:
        _on_this_thread.is_rehearsal = before
