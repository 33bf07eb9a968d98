"""Notices what a script changes between calls outside of the model's modules: globals and attributes of classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autovaruna.graph.watching.global_names import Places, shared_places
from autovaruna.graph.watching.held import entries


class SharedValues:
    """The globals, attributes of classes and variables of closures that a model's forward may read.

    A trace fixes them, so that what a script has set of them since then is part of what a trace depends on. What a
    forward of the library's own has set is not, for it differs between ranks.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: Places = {}
        self._tensors: dict[str, tuple[Tensor, int]] = {}
        self._first: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._set: dict[str, Any] = {}

    def words(self) -> str:
        """Returns, as a text without spaces, what the script has set to another value than when it was traced."""
        now = self._read() if self._places else {}
        if now != self._last:
            names = now.keys() | self._last.keys()
            self._set |= {name: now.get(name) for name in names if now.get(name) != self._last.get(name)}
            self._set = {name: value for name, value in self._set.items() if value != self._first.get(name)}
            self._last = now
        return "".join(",".join(f"{name}:{value!r}" for name, value in sorted(self._set.items())).split())

    def watch(self) -> None:
        """Takes what forward names, now; a trace has read it."""
        self._places |= shared_places(self._model)
        self._last = self._read()
        self._first = self._last | self._first

    def settle(self) -> None:
        """Takes the values as they are now: a call of the library's own has ended."""
        self._last = self._read()

    def _read(self) -> dict[str, Any]:
        """Returns the values, equal on every rank: of a tensor, how often it was replaced."""
        found: dict[str, Any] = {}
        for path, get in self._places.items():
            try:
                value = get()
            except (KeyError, ValueError):  # it is gone
                continue
            found |= {name: self._count(name, each) for name, each in entries(path, value)}
        return found

    def _count(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known, count = self._tensors.get(name, (value, 0))
        self._tensors[name] = value, count + (known is not value)
        return self._tensors[name][1]
