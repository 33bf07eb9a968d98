"""Finds the Python state that a forward changes: lists, objects, iterators, attributes of classes, globals, tensors.

A trace would fix what forward reads of them. So a forward that has changed some is traced again, as the second call of
the model would be: two graphs mean that calls differ by more than their inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from autovaruna.errors import TraceError
from autovaruna.graph.exporting.known import for_real, is_known
from autovaruna.graph.watching.held import identities, is_plain, records
from autovaruna.graph.watching.left_tensors import left_tensors

_OF_MODULES = frozenset(vars(nn.Module()))
_NOTHING = object()
_OF_TORCH = ("torch.", "builtins")


def hidden_state(model: nn.Module) -> dict[str, Any]:
    """Returns what a forward may change besides tensors and the numbers of its modules, by name."""
    return dict(_held_by_modules(model)) | state_of_classes(model)


def state_of_classes(model: nn.Module) -> dict[str, Any]:
    """Returns what the classes of a model's modules hold, and the globals that their methods name, by name."""
    return {name: each for path, _, _, value in _shared(model) for name, each in _entries(path, value)}


Place = tuple[str, dict[str, Any], str]
"""An attribute by its name, the ``__dict__`` that it is in, and its name there."""


@dataclass
class Changes:
    """What a forward has changed of the Python state.

    Attributes:
        names: of it.
        left: what modules and their objects hold since, as forward has left it, by their ``__dict__`` and its name
            there: containers, and tensors in place of some that forward has read; of objects, all. After a trace the
            old ones are put back.
        tensors: where forward has left some, in modules, their objects and their hooks.
        stand_ins: stand for what forward has put there of tensors, by the address of their numbers; with their names.
    """

    names: set[str] = field(default_factory=set)
    left: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    stand_ins: dict[int, str] = field(default_factory=dict)

    def note(
        self, model: nn.Module, before: dict[str, Any], replaced: Sequence[tuple[str, dict[str, Any], str]]
    ) -> None:
        """Compares the state with that before forward; `replaced` are tensors that forward has read and replaced."""
        after = hidden_state(model)
        self.tensors = left_tensors(model)
        self.names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        self.left = [
            (vars(owner), name, self._standing(f"{path}.{name}".removeprefix("."), value))
            for path, owner in ([*model.named_modules(), *records(model)] if self.names else ())
            for name, value in vars(owner).items()
            if not isinstance(owner, nn.Module) or (isinstance(value, list | dict) and name not in _OF_MODULES)
            if any(each.startswith(f"{path}.{name}".removeprefix(".")) for each in self.names)
        ]
        for path, owner, name in replaced:
            if not is_known(owner[name]):
                self.names.add(path)
                self.left.append((owner, name, self._stand_in(path, owner[name])))

    def _standing(self, path: str, value: Any) -> Any:
        """Returns a copy of a container in which others stand for fake tensors."""
        if isinstance(value, FakeTensor):
            return value if is_known(value) else self._stand_in(path, value)
        if type(value) is list:
            return [self._standing(f"{path}.{place}", each) for place, each in enumerate(value)]
        if type(value) is dict:
            return {name: self._standing(f"{path}.{name}", each) for name, each in value.items()}
        return copy.copy(value) if isinstance(value, list | dict) else value

    def _stand_in(self, path: str, tensor: Tensor) -> Tensor:
        shape = [length if isinstance(length, int) else length.node.hint for length in tensor.shape]
        with for_real():
            made = torch.zeros([max(length or 0, 1) for length in shape], dtype=tensor.dtype)
            self.stand_ins[made.data_ptr()] = path
        return made

    @contextmanager
    def as_left(self) -> Iterator[None]:
        """Lets modules hold what forward has left in them while the context lasts."""
        before = [(owner, name, owner.get(name, _NOTHING)) for owner, name, _ in self.left]
        for owner, name, value in self.left:
            owner[name] = value
        try:
            yield
        finally:
            for owner, name, old in before:
                owner[name] = old
                if old is _NOTHING:
                    del owner[name]

    def read_by(self, constants: Mapping[str, Tensor]) -> set[str]:
        """Returns the names of the tensors that forward has left and its next call reads, which has such constants."""
        places = [each.data_ptr() for each in constants.values()]
        return {self.stand_ins[place] for place in places if place in self.stand_ins}


def compare_calls(
    changes: Changes, first: fx.GraphModule, again: fx.GraphModule, constants: Mapping[str, Tensor]
) -> None:
    """Makes sure that a second trace, after what the first one has changed, gives the same graph.

    Args:
        changes: What the first one has changed.
        first: Its graph.
        again: The second graph.
        constants: Tensors that the second graph holds.

    Raises:
        TraceError: it does not, or reads a tensor that the first call has left.
    """
    read = changes.read_by(constants)
    if read or first.graph.python_code("self").src != again.graph.python_code("self").src:
        names = sorted(read or changes.names)
        raise TraceError(
            "forward changes Python state, and its next call computes something else: got changes of "
            f"{', '.join(names[:5])}, which a trace would fix for good. Expected a forward that changes "
            "buffers alone; make it a tensor with register_buffer(), or pass it to the model as an argument."
        )


@contextmanager
def untouched_globals(model: nn.Module) -> Iterator[None]:
    """Puts back, when the context ends, what a forward has changed of classes and globals: numbers, and containers."""
    before = [(owner, name, value, copy.copy(value)) for _, owner, name, value in _shared(model) if _is_kept(value)]
    try:
        yield
    finally:
        for owner, name, value, content in before:
            if isinstance(owner, type):
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
            else:
                owner[name] = value
            _refill(value, content)


def _is_kept(value: Any) -> bool:
    return is_plain(value) or type(value) in (list, dict, set)


def _refill(value: Any, content: Any) -> None:
    """Gives a container what was in it, if there is something else now."""
    if is_plain(value) or _ids(value) == _ids(content):
        return
    if isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)


def _ids(container: Any) -> list[Any]:
    return (
        [(id(name), id(inner)) for name, inner in container.items()]
        if isinstance(container, dict)
        else [*map(id, container)]
    )


def _held_by_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    owners = [*model.named_modules(), *records(model)]
    for path, owner in owners:
        for name, value in list(vars(owner).items()):
            if not (isinstance(owner, nn.Module) and (name in _OF_MODULES or is_plain(value))):
                yield from _entries(f"{path}.{name}".removeprefix("."), value)
            if isinstance(value, Tensor) and not isinstance(owner, nn.Module):
                yield f"{path}.{name}", id(value)


def _shared(model: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields the attributes of the modules' classes, and the globals that their methods name.

    Each with its path, the class or the globals that it is in, its name there, and itself.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in sorted(kinds, key=lambda each: f"{each.__module__}.{each.__qualname__}"):
        if not kind.__module__.startswith(_OF_TORCH):
            for name, value in list(vars(kind).items()):
                if isinstance(value, FunctionType):
                    yield from _globals(value)
                elif not name.startswith("__"):
                    yield f"{kind.__qualname__}.{name}", kind, name, value


def _globals(function: FunctionType) -> Iterator[tuple[str, Any, str, Any]]:
    known = function.__globals__
    for name in function.__code__.co_names:
        if name in known and not isinstance(known[name], type):
            yield f"{function.__module__}.{name}", known, name, known[name]


def _entries(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields plain values; of iterators, where they are."""
    if is_plain(value):
        yield path, value
    elif isinstance(value, list | dict | tuple):
        yield from identities(path, value, depth=2)
    elif type(value).__module__ == "itertools":
        yield path, repr(value)
