"""Surrounds what runs instructions: keeps the user's generator and autocast, and ends all ranks after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import torch

from autovaruna.graph.precision import is_autocast, without_autocast
from autovaruna.graph.random import untouched_generator
from autovaruna.runtime.executor import Executor
from autovaruna.runtime.worlds.world import World


class Guard(AbstractContextManager[None]):
    """Gives the user's generator and autocast back; an error in the middle of a step ends all ranks.

    Args:
        world: The ranks.
        executor: Knows where an error was raised.
        draws_or_casts: Whether operations would change the generator, or change autocast.
        device: Where they run.
        forget: Drops what a step that has failed leaves behind.
    """

    def __init__(
        self,
        world: World,
        executor: Executor,
        draws_or_casts: bool,
        device: torch.device,
        forget: Callable[[], None],
    ) -> None:
        self._world = world
        self._executor = executor
        self._draws_or_casts = draws_or_casts
        self._device = device
        self._forget = forget
        self._apart: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if self._draws_or_casts or is_autocast():
            self._apart = _apart(self._device)
            self._apart.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._apart is not None:
            apart, self._apart = self._apart, None
            apart.__exit__(kind, error, trace)
        if error is not None:
            if self._world.num_ranks > 1 and isinstance(error, Exception):
                self._world.abort(error, self._executor.where(error))
            if isinstance(error, Exception) and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(self._executor.where(error))
            self._forget()


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Keeps the user's generator and autocast from operations that would change or obey them."""
    with untouched_generator(device), without_autocast():
        yield
