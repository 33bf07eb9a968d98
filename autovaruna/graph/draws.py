"""Finds modules whose forward draws from the generators of Python or numpy: a trace would fix what they drew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autovaruna.graph.refused import InModuleError


@contextmanager
def noted_draws(model: nn.Module) -> Iterator[Draws]:
    """Notes which modules draw, on this thread, while the context lasts.

    Yields:
        What has been drawn.
    """
    draws = Draws(model)
    before = register_module_forward_pre_hook(draws.begin)
    after = register_module_forward_hook(draws.end)
    try:
        yield draws
    finally:
        before.remove()
        after.remove()


class Draws:
    """The innermost modules of a model that have drawn."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(vars(module)): path for path, module in reversed(list(model.named_modules()))}
        self._thread = get_ident()
        self._running: list[tuple[int, Any]] = []
        self._found: list[str] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        """Notes where the generators are when a module is called."""
        if get_ident() == self._thread:
            self._running.append((len(self._found), _place()))

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        """Notes a module if it has drawn, and none inside of it."""
        if get_ident() != self._thread or not self._running:
            return
        num_found, place = self._running.pop()
        path = self._paths.get(id(vars(module)))
        if path is not None and len(self._found) == num_found and _place() != place:
            self._found.append(path)

    def check(self) -> None:
        """Says which module has drawn.

        Raises:
            InModuleError: one has.
        """
        if error := self.error():
            raise error

    def error(self) -> InModuleError | None:
        """Returns an error that says which module has drawn; None: none has."""
        reason = "it draws from Python's or numpy's generator, and a trace would fix what it drew (draw from torch)"
        return InModuleError(self._found[0], reason) if self._found else None


def _place() -> tuple[Any, ...]:
    """Returns where the generators are."""
    own = random.getstate()[1]
    other: Any = numpy.random.get_state()
    return own[0], own[-1], int(other[1][0]), other[2]
