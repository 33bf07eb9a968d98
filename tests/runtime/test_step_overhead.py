"""What a step does beside the arithmetic of its stages: little, and nothing twice."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autovaruna.runtime.engine import Engine
from autovaruna.runtime.mail import Mail, MessageKind, Stream
from autovaruna.runtime.remote_parameter import RemoteTensor
from tests.catalogue import PLAIN
from tests.rank_threads import make_worlds
from tests.reference import sgd
from tests.session.training import Setup, train

pytestmark = pytest.mark.timeout(60)
CASE = next(case for case in PLAIN if case.max_stages >= 2).without_dropout()


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
    """It took 66, and then 50, most of them to look at one tensor again and again."""
    mails = [Mail(world, torch.device("cpu")) for world in make_worlds(2)]
    kind, tensor = MessageKind("graph", Stream(0, 1, 0), 4), torch.randn(4, 3)

    def message() -> None:
        mails[1].expect(kind)
        mails[0].send([tensor], kind)
        assert mails[1].receive(kind)[0] is not None

    message()
    assert calls_of_python(message) <= 32


def test_a_step_asks_nothing_of_what_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question goes through Python, for each parameter that other ranks hold."""
    asked: list[str] = []
    running = threading.local()
    run, answer = Engine.run, RemoteTensor.__dict__["__torch_function__"].__func__

    def noted_run(self: Engine, *args: Any) -> Any:
        running.is_on = True
        try:
            return run(self, *args)
        finally:
            running.is_on = False

    def noted_answer(cls: type, func: Any, *rest: Any) -> Any:
        if getattr(running, "is_on", False):
            asked.append(str(func))
        return answer(cls, func, *rest)

    monkeypatch.setattr(Engine, "run", noted_run)
    monkeypatch.setattr(RemoteTensor, "__torch_function__", classmethod(noted_answer))
    train(CASE, Setup(((0,), (1,)), 4), [CASE.batch(8, step) for step in range(3)], sgd)
    assert asked == []


def each_step(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, measure: Callable[[Callable[[], object]], float]
) -> list[float]:
    """Returns what `measure` says of each of four steps on the one rank that they run on."""
    found: list[float] = []
    run = Engine.run

    def measured(self: Engine, *args: Any) -> Any:
        returned: list[Any] = []
        found.append(measure(lambda: returned.append(run(self, *args))))
        return returned[0]

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", measured)
        train(CASE, setup, [CASE.batch(max(8, setup.num_micro_batches), step) for step in range(4)], sgd)
    return found


def test_a_step_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 261, and then 235; what does not change is not worked out again, no generator saved if none is used."""
    assert each_step(monkeypatch, Setup(((0,),), 1), calls_of_python)[-1] <= 170


def test_a_micro_batch_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 59 for a forward and a backward of two stages; at a millisecond of arithmetic each call counts."""
    few, many = (each_step(monkeypatch, Setup(((0,), (0,)), num), calls_of_python)[-1] for num in (4, 8))
    assert (many - few) / 4 <= 48
