"""Records the signals that ask a process to end, and has the end of a script, or of its threads, end all ranks.

A script that comes to its end says goodbye and waits for the others. An error that nobody caught, in any thread, or
`sys.exit` with a non-zero status, ends all ranks at once. Errors are shown in few lines. Workers of a DataLoader, which
a signal may reach as well, stay while their rank ends at a step's border.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol

from autovaruna._torch import WORKER_LOOP, run_worker, workers
from autovaruna.errors import AutoVarunaError, RankError
from autovaruna.interception.installed import ProcessPiece, Undo, put
from autovaruna.log import error_text, write_error

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a rank to end."""
has_trained = False
"""Whether this process has made a step: until then a job that is asked to end has nothing to save."""
_signals: set[signal.Signals] = set()
_before: dict[int, Any] = {}


def has_signal() -> bool:
    return bool(_signals)


def record_training() -> None:
    global has_trained
    has_trained = True


def signal_names() -> str:
    """Returns the names of the signals that have come, in one text."""
    return ", ".join(sorted(each.name for each in _signals))


def _record(number: int, frame: FrameType | None) -> None:
    _signals.add(signal.Signals(number))
    if callable(_before.get(number)):
        _before[number](number, frame)


def script_handler(number: signal.Signals) -> Any:
    """Returns what the script does with a signal, as `signal.getsignal` does."""
    handler = signal.getsignal(number)
    return _before.get(number) if handler is _record else handler


def _listen() -> Undo | None:
    """Records signals from now on, in the main thread: they end neither this process by themselves, nor workers."""
    if threading.current_thread() is not threading.main_thread():
        return None
    _before.update((number, signal.signal(number, _record)) for number in SIGNALS)
    free_workers = keep_workers()

    def undo() -> None:
        free_workers()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is _record:  # else the script has put a handler of its own there
                    signal.signal(number, _before.pop(number))

    return undo


LISTENING = ProcessPiece(_listen)


def at_end(act: Callable[[], object]) -> None:
    """Has something done when this process ends; one that multiprocessing has forked runs nothing of `atexit`."""
    if multiprocessing.parent_process() is None:
        atexit.register(act)
    else:
        Finalize(None, act, exitpriority=0)


def end_now(status: int) -> NoReturn:
    """Ends this process with its workers: those of a fork server would not notice."""
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
    os._exit(status)


def error_in_flight() -> BaseException | None:
    """Returns the error that nobody has caught and that ends this process, as it ends."""
    error: BaseException | None = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return None if isinstance(error, SystemExit) else error


class Ranks(Protocol):
    """The ranks that this one is of: a `World`."""

    @property
    def rank(self) -> int: ...

    @property
    def num_acts(self) -> int: ...

    def abort(self, error: BaseException, where: str) -> NoReturn: ...

    def end_with(self, status: int) -> NoReturn: ...

    def leave(self) -> None: ...


class Ending:
    """Ends other ranks with this one; it stays to the end of the process, for they wait for it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._process = ranks, os.getpid()
        self._status = self._num_acts = 0
        self._has_ended = False
        self._exit, self._hook, self._thread_hook = sys.exit, sys.excepthook, threading.excepthook

    def install(self) -> None:
        """Puts the hooks of Python in place. Child processes made by fork keep their own ways."""
        sys.excepthook = self.on_error
        threading.excepthook = self.on_thread_error
        sys.exit = self.on_exit
        at_end(self.on_end)

    def on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._is_child():
            self._hook(kind, error, trace)
        else:
            self._ranks.abort(error.with_traceback(trace), f"rank {self._ranks.rank} failed")

    def on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        if self._is_child() or args.exc_value is None or args.exc_type is SystemExit:
            self._thread_hook(args)
        else:
            name = "" if args.thread is None else f" in thread {args.thread.name}"
            self._ranks.abort(args.exc_value, f"rank {self._ranks.rank} failed{name}")

    def on_exit(self, status: object = None, /) -> NoReturn:
        """Records the status of `sys.exit`, which Python does not show at the end; to use the ranks later undoes it."""
        if threading.current_thread() is threading.main_thread():
            self._status, self._num_acts = status_of(status), self._ranks.num_acts
        self._exit(status)  # type: ignore[arg-type]

    def on_end(self) -> None:
        """Says goodbye; ends all ranks if the script ended with an error, or if others still wait for this rank."""
        if self._is_child() or self._has_ended:
            return
        self._has_ended = True
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None:  # a hook that the script has put in the place of ours has shown it
            self._ranks.end_with(status_after(uncaught))
        if (failure := error_in_flight()) is not None:  # of a function that multiprocessing runs
            self._ranks.abort(failure, f"rank {self._ranks.rank} failed")
        if self._status != 0 and self._num_acts == self._ranks.num_acts:
            self._ranks.end_with(self._status)
        try:
            self._ranks.leave()
        except RankError as error:
            self._ranks.abort(error, f"rank {self._ranks.rank} failed at its end")

    def _is_child(self) -> bool:
        return os.getpid() != self._process


def status_of(argument: object) -> int:
    """Returns the exit status that Python gives for the argument of `sys.exit`."""
    if argument is None:
        return 0
    return argument & 0xFF if isinstance(argument, int) else 1


def status_after(error: BaseException) -> int:
    """Returns the status of a process that an error has ended: that of a shell after Ctrl-C, else 1."""
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _show_errors() -> Undo | None:
    """Lets an error of this package that nobody caught be shown without the frames that mean nothing to a user."""
    if sys.excepthook is not sys.__excepthook__:
        return None

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, AutoVarunaError):
            write_error(error_text(error))
        else:
            sys.__excepthook__(kind, error, trace)

    return put(sys, "excepthook", show)


ERRORS_IN_FEW_LINES = ProcessPiece(_show_errors)


def keep_workers() -> Undo:
    """Has workers that start from now on hear such signals from their rank alone, with which they end."""
    return put(workers, WORKER_LOOP, _run_worker)


def _run_worker(*args: Any) -> None:
    """Runs a worker, forked or spawned: one of its threads takes the signals, for it alone sees who has sent them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_await_rank, args=(os.getppid(),), daemon=True).start()
    run_worker(*args)


def _await_rank(rank: int) -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != rank:
        pass
    os._exit(0)
