"""Steps are run again in parts, where neither analysis nor trial sees anything: what is refused, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, TraceError
from autovaruna.evidence.clock import Clock
from autovaruna.graph import trace as tracing
from autovaruna.graph.trial import PartsTrial
from autovaruna.session import traces
from tests.graph.test_trial import ALONE, MEETING, Series, batch
from tests.products import some
from tests.session.training import Setup, on_ranks, pipeline

pytestmark = pytest.mark.usefixtures("_blind")


@pytest.fixture
def _blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the analysis and the trial find nothing."""
    monkeypatch.setattr(tracing, "refuse_mixing", lambda *args: [])
    monkeypatch.setattr(traces, "refuse_other_losses", lambda *args: None)
    monkeypatch.setattr(PartsTrial, "refusal", lambda self: None)
    yield


def steps(model: nn.Module, setup: Setup, *changes: Any, **inputs: Tensor) -> list[Any]:
    """Runs a step after each change of the model; returns the losses of each rank."""
    torch.manual_seed(0)
    given = inputs or batch()

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> list[float]:
        found = []
        for change in changes or (lambda model: None,):
            change(wrapped.module)
            loss = wrapped(**given)
            loss.sum().backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    return on_ranks(setup, model, run)


ALWAYS = {"recheck_trace": 0.99}  # however long a step takes here
SETUPS = tuple(pipeline(num, num_micro_batches=2, settings=ALWAYS) for num in (1, 2))
UNTRIED = ("neighbours",)  # two of one sample


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "autovaruna.runtime.witness"]


@pytest.mark.parametrize("name", some([each for each in MEETING if each not in UNTRIED], 5))
def test_samples_that_meet_are_refused_at_the_first_step(name: str) -> None:
    for setup in SETUPS:
        with pytest.raises(AutoVarunaError, match=r"(mixes the samples|no mean over).* at .*test_trial.py:\d+"):
            steps(Series(MEETING[name]), setup)


@pytest.mark.parametrize("name", some([*ALONE], 4))
def test_samples_that_go_alone_are_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for setup in SETUPS:
        steps(Series(ALONE[name]), setup)
    assert not warnings(caplog)


def test_what_cannot_be_tried_is_told_once_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    steps(Series(MEETING["neighbours"]), SETUPS[0], *[lambda model: None] * 3)
    (text,) = warnings(caplog)
    assert "topk" in text and "test_trial.py" in text


class Scheduled(Series):
    """Has a part that a number brings in, in a buffer or a trace anew; it divides by the largest number of a batch."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__(self.way_of)
        self.beta: Any = 0.0
        if is_buffer:
            del self.beta
            self.register_buffer("beta", torch.zeros(()))

    @staticmethod
    def way_of(m: Any, x: Tensor, mark: Tensor, y: Tensor) -> Tensor:
        h = m.value(x)
        if not isinstance(m.beta, Tensor) and not m.beta:
            return m.loss(h, y)
        return m.loss((1 - m.beta) * h + m.beta * h / h.detach().abs().max(), y)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_what_a_schedule_brings_in_is_refused_in_that_step(is_buffer: bool) -> None:
    """Once, the trial of a later trace failed in silence, and that of the first one saw the first number alone."""
    seen = []

    def change(model: Any) -> None:
        seen.append(model)
        if len(seen) > 2:  # the second step, on both ranks
            model.beta = torch.tensor(0.5) if is_buffer else 0.5

    with pytest.raises(TraceError, match=r"mixes the samples.* at .*\.py:\d+"):
        steps(Scheduled(is_buffer), SETUPS[1], change, change)
    assert 2 < len(seen) <= 4


def test_each_of_several_scalars_counts() -> None:
    """Once, the loss alone did, and of a dictionary of losses nothing."""
    way: Any = lambda m, x, mark, y: {  # noqa: E731
        "box": (e := (m.value(x).mean(2) - y).square()).where(e > e.mean(), 0).mean(), "class": m.value(x).mean()
    }  # fmt: skip

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> None:
        sum(wrapped(**given).values()).backward()

    given = batch()
    with pytest.raises(TraceError, match=r"box.*differ by"):
        on_ranks(SETUPS[0], Series(way), run)


def test_a_step_is_looked_at_often_at_first_and_seldom_later() -> None:
    clock, looks = Clock(0.01, 1.0), []
    for step in range(1, 1001):
        if clock.begin("graph"):
            looks.append(step)
            clock.record("graph", [0.3, 0.1], 1.0, 0.0)
    assert looks[:8] == [1, 2, 3, 5, 9, 17, 33, 65] and len(looks) == 17 and clock.is_due("another")
    dear = Clock(0.01, 1.0)
    assert [step for step in range(1, 2001) if dear.begin("graph") and not dear.record("graph", [8.0], 1.0, 0.0)] == [
        *(1, 2), 1600
    ]  # fmt: skip
