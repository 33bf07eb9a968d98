"""Notes which attributes of its modules a model reads while it is traced: no others can change the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn


@contextmanager
def noted_reads(model: nn.Module) -> Iterator[set[str]]:
    """Notes what this thread reads while the context lasts; one thread of a process at a time may be in it.

    Args:
        model: The model.

    Yields:
        The names read so far, as ``path.of.module.attribute``, those that were not there among them.
    """
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    found: set[str] = set()
    thread = get_ident()

    def read(module: nn.Module, name: str) -> Any:
        if get_ident() == thread and not name.startswith("__"):
            path = paths.get(id(object.__getattribute__(module, "__dict__")))
            if path is not None:
                found.add(f"{path}.{name}" if path else name)
        return object.__getattribute__(module, name)

    assert "__getattribute__" not in vars(nn.Module), "one thread at a time"
    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__
