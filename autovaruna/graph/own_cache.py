"""Gives each run of a model a cache of its own for the values of parametrizations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.utils import parametrize


@contextmanager
def own_cache() -> Iterator[None]:
    """Keeps what a run computes apart from what others have, where a script calls a model in `parametrize.cached()`.

    A trace has no use for the numbers of another run, nor a micro-batch for values whose graph another one has freed.
    """
    module: Any = parametrize
    if not module._cache_enabled:
        yield
        return
    before, module._cache = module._cache, {}
    try:
        yield
    finally:
        module._cache = before
