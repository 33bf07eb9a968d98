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
        The names that were read, once the context ends, as ``path.of.module.attribute``; those that were not there are
        among them.
    """
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    names: dict[int, set[str]] = {place: set() for place in paths}
    found: set[str] = set()
    thread, plain = get_ident(), object.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        if get_ident() == thread:
            own = names.get(id(plain(module, "__dict__")))
            if own is not None:
                own.add(name)
        return plain(module, name)

    assert "__getattribute__" not in vars(nn.Module), "one thread at a time"
    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__
        for place, own in names.items():
            found.update(f"{paths[place]}.{name}".removeprefix(".") for name in own if not name.startswith("__"))
