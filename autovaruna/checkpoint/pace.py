"""Lets work wait for idle cores, as long as nobody waits for the work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress

_LEAST_SECONDS = 2.0
_LEAST_BYTES_PER_SECOND = 200e6


class Pace:
    """How urgent it is to write something: not at all at first, but once somebody waits, or it has taken too long.

    Args:
        num_bytes: How much is written.
    """

    def __init__(self, num_bytes: int) -> None:
        self._end = time.monotonic() + _LEAST_SECONDS + num_bytes / _LEAST_BYTES_PER_SECOND
        self._is_urgent: Future[None] = Future()
        self._change = threading.Lock()

    def hurry(self) -> None:
        """Says that somebody waits from now on."""
        with self._change:
            if not self._is_urgent.done():
                self._is_urgent.set_result(None)

    def run(self, steps: Iterator[object]) -> None:
        """Goes through all steps: in a thread that runs where cores are idle, then through what is left in this one.

        The thread changes between two steps, because few systems let one have its priority back.
        """
        idle: Future[None] = Future()
        threading.Thread(target=self._go_idly, args=(steps, idle), name="autovaruna idle").start()
        wait([idle, self._is_urgent], self._end - time.monotonic(), FIRST_COMPLETED)
        if not idle.done():
            self.hurry()
        idle.result()
        for _ in steps:
            pass

    def _go_idly(self, steps: Iterator[object], result: Future[None]) -> None:
        try:
            give_way()
            while not self._is_urgent.done() and next(steps, self) is not self:
                pass
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)


def give_way() -> None:
    """Lets this thread run only where a core has nothing else to do, on systems that can."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
