"""Defines how the ranks of a program end: all together, whatever way one of them ends.

A script that comes to its end says goodbye and waits for the others. An error that nobody caught, in any thread, or
`sys.exit` with a non-zero status, ends all ranks at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import NoReturn

from autovaruna.errors import RankError
from autovaruna.runtime.worlds.world import World


class Ending:
    """Ends the ranks of a world with this one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._process = os.getpid()
        self._status = 0
        self._num_acts = 0
        self._has_ended = False
        self._exit = sys.exit
        self._hook = sys.excepthook
        self._thread_hook = threading.excepthook

    def install(self) -> None:
        """Puts the hooks of Python in place. Child processes made by fork keep their own ways."""
        sys.excepthook = self.on_error
        threading.excepthook = self.on_thread_error
        sys.exit = self.on_exit
        atexit.register(self.on_end)

    def on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Ends all ranks because nobody caught `error`."""
        if self._is_child():
            self._hook(kind, error, trace)
        else:
            self.world.abort(error.with_traceback(trace), f"rank {self.world.rank} failed")

    def on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Ends all ranks because a thread failed."""
        if self._is_child() or args.exc_value is None or args.exc_type is SystemExit:
            self._thread_hook(args)
        else:
            name = "" if args.thread is None else f" in thread {args.thread.name}"
            self.world.abort(args.exc_value, f"rank {self.world.rank} failed{name}")

    def on_exit(self, status: object = None, /) -> NoReturn:
        """Notes the status of `sys.exit`, which Python does not show at the end.

        A script that uses the world again has caught it, so that it no longer counts.
        """
        if threading.current_thread() is threading.main_thread():
            self._status, self._num_acts = status_of(status), self._num_acts_now()
        self._exit(status)  # type: ignore[arg-type]

    def on_end(self) -> None:
        """Says goodbye; ends all ranks if the script ended with an error, or if others still wait for this rank."""
        if self._is_child() or self._has_ended:
            return
        self._has_ended = True
        if self._status != 0 and self._num_acts == self._num_acts_now():
            self.world.transport.end(self._status)
        try:
            self.world.leave()
        except RankError as error:
            self.world.abort(error, f"rank {self.world.rank} failed at its end")

    def _num_acts_now(self) -> int:
        """Returns how often this rank's script has used the world."""
        return sum(self.world.watch.counts.values())

    def _is_child(self) -> bool:
        return os.getpid() != self._process


def status_of(argument: object) -> int:
    """Returns the exit status that Python gives for the argument of `sys.exit`."""
    if argument is None:
        return 0
    return argument & 0xFF if isinstance(argument, int) else 1
