"""What a step does beside the arithmetic of its stages: little, and nothing twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from autovaruna.runtime.engine import Engine
from tests.catalogue import PLAIN
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
