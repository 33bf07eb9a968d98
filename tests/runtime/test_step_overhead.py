"""What a step does beside the arithmetic of its stages: little, and nothing twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autovaruna.runtime.in_process import make_worlds
from autovaruna.runtime.mail import Kind, Mail, Route

pytestmark = pytest.mark.timeout(60)


def calls_of_python(act: Callable[[], object]) -> int:
    """Returns how many functions of Python an act calls."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_message_takes_few_calls() -> None:
    """It took 66, most of them to look at one tensor again and again."""
    mails = [Mail(world, torch.device("cpu")) for world in make_worlds(2)]
    kind, tensor = Kind("graph", Route(0, 1, 0), 4), torch.randn(4, 3)

    def message() -> None:
        mails[1].expect(kind)
        mails[0].send([tensor], kind)
        assert mails[1].take(kind)[0] is not None

    message()
    assert calls_of_python(message) <= 50
