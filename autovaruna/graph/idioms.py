"""Lets a model be traced with idioms that torch.export takes for something else."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.distributions import Distribution


@contextmanager
def idioms() -> Iterator[None]:
    """Traces ``len(x)`` as ``x.shape[0]``, which fixes no batch size, and leaves checks of distributions out.

    For this thread, while the context lasts; checks of distributions for all threads, since torch has one switch.
    """
    tracing, plain = get_ident(), builtins.len
    checks = Distribution._validate_args

    def length(value: Any, /) -> Any:
        if isinstance(value, Tensor) and get_ident() == tracing and value.dim():
            return value.shape[0]
        return plain(value)

    builtins.len = length
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        builtins.len = plain
        Distribution.set_default_validate_args(checks)
