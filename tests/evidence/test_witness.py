"""Steps are run again in parts, where neither the analysis nor the trial sees anything: what is refused, what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, TraceError
from autovaruna.evidence.clock import Clock
from autovaruna.graph import trace as tracing
from autovaruna.graph.trial import PartsTrial
from autovaruna.session import traces
from tests.graph.test_trial import ALONE, MEETING, SAMPLES, Series, Way, batch
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


SETUPS = (pipeline(1, num_micro_batches=2), pipeline(2, num_micro_batches=2))


@pytest.mark.parametrize("name", some([*MEETING], 6))
def test_samples_that_meet_are_refused_at_the_first_step(name: str) -> None:
    for setup in SETUPS:
        with pytest.raises(AutoVarunaError, match=r"(mixes the samples|no mean over).* at .*test_trial.py:\d+"):
            steps(Series(MEETING[name]), setup)


@pytest.mark.parametrize("name", some([*ALONE], 4))
def test_samples_that_go_alone_are_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "autovaruna.runtime.witness"):
        for setup in SETUPS if name != "outputs" else ():
            steps(Series(ALONE[name]), setup)
    assert not caplog.records
