"""Defines `Stopping`: ranks end a run together, at one step, after a signal that came to any of them at any time.

A scheduler that takes a machine back sends a signal to each rank, some milliseconds apart, so that ranks see it in
different steps. What each has heard travels with what ranks tell each other at a call of the model anyway; after that
call all know the same.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

STATUS = 75
"""What a run ends with after it has saved because of a signal; the system's EX_TEMPFAIL: start it again."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_heard: set[signal.Signals] = set()
_before: dict[int, Any] = {}


def listen() -> None:
    """Notes signals from now on, before what the script does with them; without that they no longer end this process.

    Python takes signals in the main thread alone: elsewhere this does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if number not in _before:
                _before[number] = signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    _heard.add(signal.Signals(number))
    if callable(_before[number]):
        _before[number](number, frame)


def has_heard() -> bool:
    """Says whether a signal has asked this process to end."""
    return bool(_heard)


class Stopping:
    """Whether the run is to end, as one model's calls make it known."""

    def __init__(self) -> None:
        self.is_agreed = False  # whether all ranks know, since the same call, that it is
        self._is_wanted = False
        self._first_step = 0
        self._num_before = 0

    @property
    def own(self) -> bool:
        """Whether this rank wants it: what it tells the others at the next call."""
        return self._is_wanted or has_heard()

    def want(self, is_wanted: bool) -> None:
        """Takes what the script of this rank wants; it stays so."""
        self._is_wanted |= is_wanted

    def number_from(self, step: int, num_steps: int) -> None:
        """Takes the number that the script gives the state after so many steps of its optimizer."""
        self._first_step = step - num_steps

    def step_after(self, num_steps: int) -> int:
        """Returns the number that the script gives the state after so many steps of its optimizer."""
        return self._first_step + num_steps

    def is_due(self, num_steps: int) -> bool:
        """Says, once a call, whether this is where to save: the optimizer has stepped since the call before."""
        has_stepped, self._num_before = num_steps != self._num_before, num_steps
        return has_stepped and self.is_agreed

    def save_and_end(self, save: Callable[[int], None], num_steps: int) -> NoReturn:
        """Saves the state under its number, and ends this rank with `STATUS`; every rank does."""
        step = self.step_after(num_steps)
        save(step)
        names = ", ".join(sorted(each.name for each in _heard)) or "a signal on another rank"
        logger.warning("got %s: saved step %d, and end with status %d", names, step, STATUS)
        raise SystemExit(STATUS)
