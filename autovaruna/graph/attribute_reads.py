"""Notes which attributes of its modules a model reads while it is traced: no others can change the graph.

So it does for the objects that modules hold, a configuration for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch import nn

from autovaruna.graph.held import records


@contextmanager
def noted_reads(model: nn.Module) -> Iterator[set[str]]:
    """Notes what this thread reads while the context lasts; one thread of a process at a time may be in it.

    Args:
        model: The model.

    Yields:
        The names that were read, once the context ends, as ``path.of.module.attribute``; those that were not there are
        among them.
    """
    held = records(model)
    paths = {id(vars(each)): path for path, each in [*held, *model.named_modules()]}
    names: dict[int, set[str]] = {place: set() for place in paths}
    found: set[str] = set()
    assert "__getattribute__" not in vars(nn.Module), "one thread at a time"
    kinds: list[type] = [nn.Module, *(type(each) for _, each in held)]
    try:
        with ExitStack() as changed:
            for kind in dict.fromkeys(kinds):
                changed.enter_context(_noting(kind, names))
            yield found
    finally:
        for place, own in names.items():
            found.update(f"{paths[place]}.{name}".removeprefix(".") for name in own if not name.startswith("__"))


@contextmanager
def _noting(kind: type, names: Mapping[int, set[str]]) -> Iterator[None]:
    """Notes what this thread reads of the objects of a class, by the identity of their ``__dict__``."""
    own = vars(kind).get("__getattribute__")
    plain: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]
    thread, of_object = get_ident(), object.__getattribute__

    def read(owner: Any, name: str) -> Any:
        if get_ident() == thread:
            known = names.get(id(of_object(owner, "__dict__")))
            if known is not None:
                known.add(name)
        return plain(owner, name)

    kind.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = own  # type: ignore[method-assign]
