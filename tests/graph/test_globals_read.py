"""Holds which globals are noted."""

from __future__ import annotations

import sys
from typing import Any

from autovaruna.graph.recalling.globals_read import GlobalsRead, unnoted

FIRST, SECOND = [1], [2]


def first() -> list[int]:
    return FIRST


def second() -> list[int]:
    return SECOND


def test_nothing_is_noted_while_torch_runs_an_operation() -> None:
    read = GlobalsRead()
    with read.noting():
        with unnoted():
            first()
        second()
    assert {name for _, name in read.now()} == {"SECOND"}


def test_a_debugger_goes_on_while_torch_runs_an_operation() -> None:
    def debugger(frame: Any, event: str, argument: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        with unnoted():
            assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
