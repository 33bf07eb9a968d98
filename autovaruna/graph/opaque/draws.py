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

from autovaruna.graph.export.refused import InModuleError

_REASON = "it draws from Python's or numpy's generator, and a trace would fix what it drew (draw from torch)"


@contextmanager
def noted_draws(model: nn.Module, by_module: bool) -> Iterator[Draws]:
    """Notes what is drawn, on this thread, while the context lasts; call `start` inside of it.

    Args:
        model: The model.
        by_module: Whether to note which modules draw. To look at the generators around every module takes long, and
            few models draw at all.

    Yields:
        What has been drawn.
    """
    draws = Draws(model, by_module)
    hooks = (
        [register_module_forward_pre_hook(draws.begin), register_module_forward_hook(draws.end)] if by_module else []
    )
    try:
        yield draws
    finally:
        for hook in hooks:
            hook.remove()


class Draws:
    """The innermost modules of a model that have drawn."""

    def __init__(self, model: nn.Module, by_module: bool) -> None:
        self._paths = {id(vars(module)): path for path, module in reversed(list(model.named_modules()))}
        self._by_module = by_module
        self._thread = get_ident()
        self._first: Any = None
        self._running: list[tuple[int, Any]] = []
        self._found: list[str] = []

    def start(self) -> None:
        """Notes where the generators are before the model is called."""
        self._first = _place()

    def are_hidden(self) -> bool:
        """Whether something was drawn and no look was taken at which module did."""
        return not self._by_module and _place() != self._first

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
            InModuleError: one has, or may have.
        """
        if error := self.error():
            raise error
        if self.are_hidden():
            raise InModuleError("", _REASON)

    def error(self) -> InModuleError | None:
        """Returns an error that says which module has drawn; None: none has."""
        return InModuleError(self._found[0], _REASON) if self._found else None


def _place() -> tuple[Any, ...]:
    """Returns where the generators are."""
    own = random.getstate()[1]
    other: Any = numpy.random.get_state()
    return own[0], own[-1], int(other[1][0]), other[2]
