"""Notes which attributes of its modules a model reads while it is traced: no others can change the graph.

So it does for the objects that modules hold, a configuration for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from autovaruna.graph.watching.held import records

NOTHING = object()
"""Stands for an attribute that is not there."""


Tables = dict[int, dict[str, Any]]
"""What was read, by the identity of the owner's ``__dict__``: names, each with what it was when it was read first."""


@dataclass
class Reads:
    """What a model reads of its modules.

    Attributes:
        owners: ``__dict__`` of each module, and of what they hold, by its identity.
        tables: what was read since the context of `noted_reads` or `apart` began.
        names: as ``path.of.module.attribute``, once `noted_reads` has ended; those that were not there are among them.
        replaced: the attributes that were read as they were before, and hold another tensor now: name, ``__dict__`` of
            the owner, and name there.
    """

    owners: dict[int, dict[str, Any]]
    tables: Tables
    names: set[str] = field(default_factory=set)
    replaced: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)

    @contextmanager
    def apart(self) -> Iterator[Tables]:
        """Notes what is read while the context lasts in tables of its own, too, which it yields."""
        outer, self.tables = self.tables, {place: {} for place in self.owners}
        inner = self.tables
        try:
            yield inner
        finally:
            self.tables = outer
            for place, own in inner.items():
                outer[place] = own | outer[place]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Notes nothing while the context lasts."""
        outer, self.tables = self.tables, {}
        try:
            yield
        finally:
            self.tables = outer

    def add(self, owner: Any, names: Iterable[str]) -> None:
        """Takes attributes of an owner as read, as they are now."""
        own = vars(owner)
        self.tables[id(own)] = {name: own.get(name, NOTHING) for name in names} | self.tables[id(own)]

    def _take(self, path: str, now: dict[str, Any], before: dict[str, Any], own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if name.startswith("__"):
                continue
            full = f"{path}.{name}".removeprefix(".")
            self.names.add(full)
            is_old = value is before.get(name, NOTHING)
            if is_old and isinstance(now.get(name), Tensor) and now[name] is not value:
                self.replaced.append((full, now, name))


@contextmanager
def noted_reads(model: nn.Module) -> Iterator[Reads]:
    """Notes what this thread reads while the context lasts; one thread of a process at a time may be in it.

    Args:
        model: The model.

    Yields:
        What was read, once the context ends.
    """
    held = records(model)
    paths = {id(vars(each)): path for path, each in [*held, *model.named_modules()]}
    owners = {id(vars(each)): vars(each) for _, each in [*held, *model.named_modules()]}
    before = {place: dict(own) for place, own in owners.items()}
    found = Reads(owners, {place: {} for place in owners})
    assert "__getattribute__" not in vars(nn.Module), "one thread at a time"
    kinds: list[type] = [nn.Module, *(type(each) for _, each in held)]
    try:
        with ExitStack() as changed:
            for kind in dict.fromkeys(kinds):
                changed.enter_context(_noting(kind, found))
            yield found
    finally:
        for place, own in owners.items():
            found._take(paths[place], own, before[place], found.tables[place])


@contextmanager
def _noting(kind: type, found: Reads) -> Iterator[None]:
    """Notes what this thread reads of the objects of a class."""
    own = vars(kind).get("__getattribute__")
    plain: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]
    thread, of_object = get_ident(), object.__getattribute__

    def read(owner: Any, name: str) -> Any:
        if get_ident() == thread:
            place = of_object(owner, "__dict__")
            known = found.tables.get(id(place))
            if known is not None and name not in known:
                known[name] = place.get(name, NOTHING)
        return plain(owner, name)

    kind.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = own  # type: ignore[method-assign]
