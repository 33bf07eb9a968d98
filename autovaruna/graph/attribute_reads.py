"""Notes which attributes of its modules a model reads while it is traced: no others can change the graph.

So it does for the objects that modules hold, a configuration for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from autovaruna.graph.held import records

_NOTHING = object()


@dataclass
class Reads:
    """What a model has read of its modules, once the context of `noted_reads` has ended.

    Attributes:
        names: as ``path.of.module.attribute``; those that were not there are among them.
        replaced: the attributes that were read as they were before, and hold another tensor now: name, ``__dict__`` of
            the owner, and name there.
    """

    names: set[str] = field(default_factory=set)
    replaced: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)

    def _take(self, path: str, now: dict[str, Any], before: dict[str, Any], own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if name.startswith("__"):
                continue
            full = f"{path}.{name}".removeprefix(".")
            self.names.add(full)
            is_old = value is before.get(name, _NOTHING)
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
    owners = {id(vars(each)): (path, vars(each)) for path, each in [*held, *model.named_modules()]}
    before = {place: dict(own) for place, (_, own) in owners.items()}
    names: dict[int, dict[str, Any]] = {place: {} for place in owners}
    found = Reads()
    assert "__getattribute__" not in vars(nn.Module), "one thread at a time"
    kinds: list[type] = [nn.Module, *(type(each) for _, each in held)]
    try:
        with ExitStack() as changed:
            for kind in dict.fromkeys(kinds):
                changed.enter_context(_noting(kind, names))
            yield found
    finally:
        for place, (path, own) in owners.items():
            found._take(path, own, before[place], names[place])


@contextmanager
def _noting(kind: type, names: Mapping[int, dict[str, Any]]) -> Iterator[None]:
    """Notes what this thread reads of the objects of a class, by the identity of their ``__dict__``.

    With each name comes what it was when it was read first.
    """
    own = vars(kind).get("__getattribute__")
    plain: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]
    thread, of_object = get_ident(), object.__getattribute__

    def read(owner: Any, name: str) -> Any:
        if get_ident() == thread:
            place = of_object(owner, "__dict__")
            known = names.get(id(place))
            if known is not None and name not in known:
                known[name] = place.get(name, _NOTHING)
        return plain(owner, name)

    kind.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = own  # type: ignore[method-assign]
