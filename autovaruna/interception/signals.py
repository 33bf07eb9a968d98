"""Records the signals that ask a process to end, and then calls the script's own handlers."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from autovaruna.interception.installed import ProcessPiece, Undo

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

has_trained = False
"""Whether this process has made a step: until then a job that is asked to end has nothing to save."""
_heard: set[signal.Signals] = set()
_before: dict[int, Any] = {}


def has_heard() -> bool:
    """Says whether a signal has asked this process to end."""
    return bool(_heard)


def record_training() -> None:
    """Records that this process has made a step."""
    global has_trained
    has_trained = True


def heard_names() -> str:
    """Returns the names of the signals that have come, in one text."""
    return ", ".join(sorted(each.name for each in _heard))


def _record(number: int, frame: FrameType | None) -> None:
    _heard.add(signal.Signals(number))
    if callable(_before.get(number)):
        _before[number](number, frame)


def script_handler(number: signal.Signals) -> Any:
    """Returns what the script does with a signal, as `signal.getsignal` does."""
    handler = signal.getsignal(number)
    return _before.get(number) if handler is _record else handler


def _listen() -> Undo | None:
    """Records signals from now on: they no longer end this process by themselves.

    Python takes signals in the main thread alone: elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    _before.update((number, signal.signal(number, _record)) for number in SIGNALS)

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is _record:  # else the script has put a handler of its own there
                    signal.signal(number, _before.pop(number))

    return undo


LISTENING = ProcessPiece(_listen)
