"""Notes the innermost line of a user's forward for each operation of a trace; the whole stack takes long."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

from torch.fx import proxy

from autovaruna.graph.origin import is_users

_NAME = "CapturedTraceback"
_FORWARD = FrameSummary(__file__, 1, "forward", line="forward")  # torch leaves out what is outside of a forward


@contextmanager
def short_stacks() -> Iterator[None]:
    """Lets nodes that are made while the context lasts know no more of the stack than that line."""
    full: Any = getattr(proxy, _NAME, None)  # private to torch: without it, stacks are whole
    if full is not None:
        setattr(proxy, _NAME, _Stack)
    try:
        yield
    finally:
        if full is not None:
            setattr(proxy, _NAME, full)


def line_of_forward() -> StackSummary:
    """Returns the innermost line of a user's forward, as nodes that are made now would know it."""
    return _Stack.extract().summary()


class _Stack:
    """Stands for torch's record of a stack."""

    def __init__(self, frames: list[FrameSummary]) -> None:
        self.frames = frames

    @classmethod
    def extract(cls, *args: Any, **kwargs: Any) -> _Stack:
        """Returns the stack of the caller."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (frame.f_code.co_name == "forward" and is_users(frame.f_code.co_filename)):
            frame = frame.f_back
        return cls([_FORWARD] if frame is None else [_FORWARD, _summary(frame)])

    def summary(self) -> StackSummary:
        """Returns its frames, the outermost first."""
        return StackSummary.from_list(self.frames)


def _summary(frame: FrameType) -> FrameSummary:
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return FrameSummary(code.co_filename, line, code.co_name, line=text)
