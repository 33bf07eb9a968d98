"""The trace of a run: one file for all ranks, and an account of lost time that adds up."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna import AutoVaruna
from autovaruna.__main__ import main
from autovaruna.runtime.timeline import account
from tests.catalogue import PLAIN
from tests.reference import sgd
from tests.session.training import QUIET, Setup, train

CASE = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
NUM_STEPS = 3


def traced(path: Path) -> dict[str, Any]:
    """Returns the settings that write a trace."""
    return {"trace_events": True, "trace_events_file": str(path)}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the trace of a run on two stages."""
    path = tmp_path_factory.mktemp("trace") / "events.json"
    batches = [CASE.batch(4, step) for step in range(NUM_STEPS)]
    train(CASE, Setup(((0,), (1,)), 4, settings=traced(path)), batches, sgd, [[2, 2]] * NUM_STEPS)
    return path


def rows_of(path: Path) -> list[dict]:
    """Reads the open array."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def test_a_trace_has_every_instruction_of_every_step_measured_and_predicted(trace: Path) -> None:
    for process in (0, 1):
        names = [row["name"] for row in rows_of(trace) if row["ph"] == "X" and row["pid"] == process]
        for stage in (0, 1):
            for kind in "FB":
                assert all(names.count(f"{stage}{kind}{m}") == NUM_STEPS for m in range(4))


def test_every_message_is_an_arrow_that_arrives_after_it_left(trace: Path) -> None:
    starts = {row["id"]: row["ts"] for row in rows_of(trace) if row["ph"] == "s"}
    ends = {row["id"]: row["ts"] for row in rows_of(trace) if row["ph"] == "f"}
    assert len(starts) == NUM_STEPS * 2 * 4
    assert starts.keys() == ends.keys()
    measured = [row for row in rows_of(trace) if row["ph"] == "X" and row["pid"] == 0]
    begins = {row["name"]: row["ts"] for row in measured if row["args"]["step"] == NUM_STEPS}
    for name in starts:
        step, sender, _ = name.split("/")
        assert starts[name] <= ends[name]
        if int(step) == NUM_STEPS:
            assert ends[name] > begins[sender] - 500, "clocks of one host are within half a millisecond"


def test_the_command_shows_and_draws_a_trace(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["trace", str(trace), "--plot", str(tmp_path / "step.png")]) == 0
    assert "forward" in capsys.readouterr().out
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("[\nhello\nworld\n")
    assert main(["trace", str(tmp_path / "x.json")]) == 1
    assert "line 2 of" in capsys.readouterr().err


def test_a_step_is_reported_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("autovaruna.runtime")
    logger.addHandler(caplog.handler)
    level, logger.level = logger.level, logging.DEBUG  # one that no rank has set, which would change it
    try:
        setup = Setup(((0,), (1,)), 2, settings=traced(tmp_path / "events.json"))
        train(CASE, setup, [CASE.batch(4, 0)] * 2, sgd, [[2, 2]] * 2)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    assert "bubble  imbalance  messages" in caplog.text


def test_lost_time_adds_up_and_is_told_apart() -> None:
    """Rank 1 waits 1 s for rank 0's work and 0.5 s for its message, works 1 s less, and is done when rank 0 is."""
    spans = [[("0F0", 0.0, 0.0, 1.0), ("0B0", 1.0, 2.7, 4.0)], [("1F0", 0.0, 1.5, 2.0), ("1B0", 2.1, 2.1, 2.6)]]
    awaited = {"1F0": ["0F0"], "0B0": ["1B0"]}
    lost = account(spans, [(4.0, 4.2), (2.6, 2.8)], awaited)
    for each in lost:
        assert sum(each.parts.values()) == pytest.approx(each.step) == pytest.approx(4.2)
    assert lost[1].messages == pytest.approx(0.5)
    assert lost[0].messages == pytest.approx(0.1)
    assert lost[1].overhead == pytest.approx(0.1)
    assert lost[1].imbalance == pytest.approx(1.3)
    assert lost[0].imbalance == 0.0


def test_training_goes_on_when_its_trace_cannot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, a full disk ended a run for its trace."""
    path = tmp_path / "events.json"
    model = AutoVaruna(torch.nn.Linear(3, 1), **QUIET, num_micro_batches=2, **traced(path))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            model(torch.ones(4, 3)).sum().backward()
            if step == 0:
                path.unlink()
                path.mkdir()
    assert caplog.text.count("the trace ends here") == 1
