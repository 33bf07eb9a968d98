"""Lets a script's handler of SIGUSR1 run between two steps, the same two on every rank.

The signal reaches each rank at a moment of its own, in the middle of a step often, while what a handler does (a
checkpoint, an exit) all ranks must do together. So the signal is noted, and before its next step every rank calls the
handler if any rank has one more than was answered; a copy that comes late is then known.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from autovaruna.runtime.worlds.world import World


class Requests:
    """The signals of a job.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_heard = 0
        self._num_answered = 0
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def take_over(self) -> None:
        """Puts the script's handler aside, if it has one."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGUSR1)
        if callable(handler) and handler != self._note:
            self._handler = handler
            signal.signal(signal.SIGUSR1, self._note)

    def answer(self) -> None:
        """Calls the script's handler if a signal has come to any rank. Collective."""
        self.take_over()
        most = max(self._world.gather_objects(self._num_heard, "looking for signals"))
        if most > self._num_answered:
            self._num_answered = most
            if self._handler is not None:
                self._handler(signal.SIGUSR1, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._num_heard += 1
