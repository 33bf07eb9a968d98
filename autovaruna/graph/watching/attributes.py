"""Notices what a script changes of a model between calls: attributes, what they hold, hooks, parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn

from autovaruna.graph.watching.held import entries, is_container, is_plain, records

_OF_MODULES = frozenset(vars(nn.Module()))
_TRAINING, _VALUES = itemgetter("training"), methodcaller("values")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Attributes:
    """The attributes of a model's modules that are no modules or parameters, and how many hooks these have.

    Numbers and texts count, those in containers and in objects such as a configuration, too, and arrays. Of tensors
    that are attributes it counts how often they were replaced, for a trace reads the tensor itself.

    A trace fixes those that it reads. So what a script has set of these since then is part of what a trace depends on;
    what a forward of the library's own has set is not, for it differs between ranks.

    Args:
        model: The model.

    Attributes:
        modules: its modules, each once; as they were when `words` was last called.
        tables: the parameters of each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors: dict[str, tuple[Tensor, int]] = {}
        self._watched: frozenset[str] | None = None
        self._set: dict[str, Any] = {}
        self._learn()
        self._slots = self._slots_now()
        self._first = dict(self._last)
        self._kinds = self._first_kinds = self._kinds_now()
        self._settled = self._ids()

    def words(self) -> str:
        """Returns, as a text without spaces, what the script has set to another value than when it was traced."""
        if self._read() != self._values:
            before = self._last
            self._learn()
            names = before.keys() | self._last.keys()
            self._set |= {name: self._last.get(name) for name in names if before.get(name) != self._last.get(name)}
            self._set = {name: value for name, value in self._set.items() if value != self._first.get(name)}
            self._kinds = self._kinds_now()
        if self._watched is None or (not self._set and self._kinds == self._first_kinds):
            return ""
        found = [f"{name}:{value!r}" for name, value in sorted(self._set.items())]
        found += [self._kinds] if self._kinds != self._first_kinds else []
        return "".join(",".join(found).split())

    def replaced(self) -> list[str]:
        """Returns the names of parameters that are other tensors than when `settle` was called; call `words` before."""
        if self._ids() == self._settled:
            return []
        before, now = self._slots, self._slots_now()
        return sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))

    def watch(self, reads: frozenset[str]) -> None:
        """Takes the names of attributes that a trace has read, now."""
        known = self._watched
        self._watched = reads if known is None else known | reads
        self._learn()
        if known is None:
            self._set = {}
            self._first_kinds = self._kinds = self._kinds_now()
            self._first = dict(self._last)
        else:
            self._first |= {name: self._last[name] for name in reads - known if name in self._last}

    def settle(self) -> None:
        """Takes attributes and parameters as they are now: a call of the library's own has ended."""
        self._learn()
        self._slots, self._settled = self._slots_now(), self._ids()

    def _learn(self) -> None:
        named = list(self._model.named_modules())
        self.modules = [module for _, module in named]
        self._dicts = [vars(module) for module in self.modules]
        self._own_dicts = self._dicts
        self._hooks = [place[kind] for place in self._dicts for kind in HOOKS if kind in place]
        self.tables = [place["_parameters"] for place in self._dicts]
        self._holders = [place["_modules"] for place in self._dicts]
        found = records(self._model)
        self._dicts = [*self._own_dicts, *(vars(each) for _, each in found)]
        self._paths = [path for path, _ in [*named, *found]]
        counted = [
            [name for name in place if self._counts(path, name)]
            for path, place in zip(self._paths, self._dicts, strict=True)
        ]
        names = [
            [name for name in own if is_plain(place[name])] for own, place in zip(counted, self._dicts, strict=True)
        ]
        self._getters = [(itemgetter(*own), place) for own, place in zip(names, self._dicts, strict=True) if own]
        self._others = [
            (f"{path}.{name}".removeprefix("."), place, name)
            for path, own, place in zip(self._paths, counted, self._dicts, strict=True)
            for name in own
            if name not in _OF_MODULES and not is_plain(place[name])
        ]
        self._containers = [each for each in self._others if is_container(each[1][each[2]])]
        self._values = self._read()
        self._last = {
            f"{path}.{name}".removeprefix("."): place[name]
            for path, own, place in zip(self._paths, names, self._dicts, strict=True)
            for name in own
        }
        for path, place in zip(self._paths, self._dicts, strict=True):
            for kind in HOOKS:
                self._last[f"{path}.{kind}".removeprefix(".")] = len(place.get(kind, ()))
        self._last |= self._held()

    def _counts(self, path: str, name: str) -> bool:
        is_read = self._watched is None or f"{path}.{name}".removeprefix(".") in self._watched
        return is_read and name != "training"

    def _read(self) -> list[Any]:
        """Returns everything that is watched; cheap, for every call."""
        try:
            values: list[Any] = [getter(place) for getter, place in self._getters]
        except KeyError:  # one is gone
            return []
        children = map(id, chain.from_iterable(map(_VALUES, self._holders)))
        held = [(name, id(value) if isinstance(value, Tensor) else value) for name, value in self._entries()]
        objects = [id(place.get(name)) for _, place, name in self._others]
        values += map(len, self._dicts)
        values += map(len, self._hooks)
        return [*values, *children, *held, *objects]

    def _entries(self) -> Iterator[tuple[str, Any]]:
        """Yields what is in containers that are watched, and tensors."""
        if self._watched is not None:
            for full, place, name in self._containers:
                if is_container(value := place.get(name)):
                    yield from entries(full, value)

    def _held(self) -> dict[str, Any]:
        """Returns the same as values that are equal on every rank: of a tensor, how often it was replaced."""
        found: dict[str, Any] = {}
        for name, value in self._entries():
            if isinstance(value, Tensor):
                known, count = self._tensors.get(name, (value, 0))
                self._tensors[name] = value, count + (known is not value)
                value = self._tensors[name][1]
            found[name] = value
        return found

    def parameters(self) -> Iterator[Any]:
        """Yields what is in the place of each parameter, None where there is none; cheap, for every call."""
        return chain.from_iterable(map(_VALUES, self.tables))

    def training(self) -> list[bool]:
        """Returns whether each module is in training mode; cheap, for every call."""
        try:
            return list(map(_TRAINING, self._own_dicts))
        except KeyError:  # one keeps it elsewhere
            return [module.training for module in self.modules]

    def _ids(self) -> list[int]:
        return list(map(id, self.parameters()))

    def _kinds_now(self) -> str:
        return ",".join(f"{path}={type(module).__qualname__}" for path, module in self._model.named_modules())

    def _slots_now(self) -> dict[str, int]:
        return {
            f"{path}.{name}".removeprefix("."): id(tensor)
            for path, module in self._model.named_modules()
            for name, tensor in module._parameters.items()
        }
