"""Puts something in the place of an attribute, and undoes it; pieces that models share are undone after the last."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import RLock
from typing import Any

Undo = Callable[[], None]


def put(owner: Any, name: str, value: Any) -> Undo:
    """Sets an attribute of an object, class or module; returns what undoes it.

    What somebody else has put there since stays: it calls ours, which does nothing more than what it replaced.
    """
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return undo


def put_all(*places: tuple[Any, str, Any]) -> Undo:
    """Sets attributes as `put`; returns what undoes it, the last one first."""
    undo = ExitStack()
    for place in places:
        undo.callback(put(*place))
    return undo.close


class ProcessPiece:
    """A change of the whole process that models share: made for the first one, undone after the last.

    `install` returns what undoes it; None: it cannot be made now, and is tried for the next one.
    """

    def __init__(self, install: Callable[[], Undo | None]) -> None:
        self._install, self._lock = install, RLock()  # ranks may be threads; a model may be collected within `use`
        self._num_users = 0
        self._undo: Undo | None = None

    def acquire(self) -> Undo:
        """Makes the change, unless it is there; returns what its user calls, once, when it needs it no more."""
        with self._lock:
            self._num_users += 1
            if self._undo is None:
                self._undo = self._install()
        return self._release

    def _release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._undo is not None:
                undo, self._undo = self._undo, None
                undo()
