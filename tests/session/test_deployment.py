"""Deployments in use: saved, used, stale, edited by hand, broken; on ranks that are threads of this process."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, DeploymentError, MeasureError
from autovaruna.graph.trace import trace
from autovaruna.planner.records import Plan
from autovaruna.ranks.world import World
from autovaruna.session import measuring, traces
from tests.catalogue.small import Written
from tests.products import some
from tests.rank_threads import run_ranks
from tests.session.training import trace_shared

Lines = Callable[[], list[str]]


def make_net(width: int) -> nn.Module:
    """Returns a model that has a loss, and places to be cut."""
    layers = {"first": nn.Linear(4, width), "middle": nn.Linear(width, width), "last": nn.Linear(width, 2)}
    forward = lambda self, x: self.last(torch.relu(self.middle(self.first(x)))).square().mean()  # noqa: E731
    return Written(forward, **layers)


def start(num_ranks: int = 2, width: int = 8, batch: int = 4, **settings: Any) -> Plan:
    """Starts a run, as a script does, and trains for a step; returns the plan."""
    net = make_net(width)

    def be_rank(_: World) -> Plan:
        mine = copy.deepcopy(net)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        model = AutoVaruna(mine, optimizer, progress=False, **settings)
        model(torch.ones(batch, 4)).backward()
        assert model.plan is not None
        return model.plan

    with trace_shared("deployment") if traces.trace is trace else nullcontext():
        return run_ranks(num_ranks, be_rank)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOVARUNA_CONF_DIR", str(folder))
        start(deployment_file=str(folder / "deployment.json"))
    return (folder / "deployment.json").read_bytes()


@pytest.fixture
def file(saved: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file of a deployment of two stages, whose run is the default of `start`."""
    file = tmp_path / "alone" / "deployment.json"
    file.parent.mkdir()
    file.write_bytes(saved)
    monkeypatch.setenv("AUTOVARUNA_DEPLOYMENT_FILE", str(file))
    return file


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    for room in ("session", "planner"):  # no rank sets these
        caplog.set_level(logging.DEBUG, f"autovaruna.{room}")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: pytest.fail("measured"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def two_stages(content: dict[str, Any]) -> None:
    """Writes two stages with the ranks in reverse, as a person may."""
    stage = content["stages"][0] | {"in_flight": 2}
    content["stages"] = [stage | {"cut": "", "ranks": [1]}, stage | {"cut": "last", "ranks": [0]}]
    content["num_micro_batches"] = 4


@pytest.mark.parametrize("mode", ["auto", True])
def test_a_second_start_measures_nothing_and_says_so(file: Path, no_measuring: None, mode: Any, lines: Lines) -> None:
    before = file.read_bytes()
    start(load_deployment=mode)
    assert f"using the saved deployment {file}" in lines()
    assert file.read_bytes() == before


STALE: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"width": 16}, "the model changed"),
    "num_ranks": ({"num_ranks": 3}, r"the number of ranks changed \(2 -> 3\)"),
    "batch": ({"batch": 8}, r"global batch changed \(8 -> 16\)"),
    "memory": ({"memory_limit_bytes": "1GiB"}, "the memory limit changed"),
    "mode": ({"loss_mode": "outputs"}, r"setting loss_mode changed \(auto -> outputs\)"),
    "setting": ({"num_micro_batches": 4}, r"setting num_micro_batches changed \(0 -> 4\)"),
}
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "cut": (lambda c: c["stages"].append(c["stages"][0] | {"cut": "lost"}), "cut 'lost' names no block"),
    "ranks": (lambda c: c["stages"][0].update(ranks=[5]), r"stages\[0\].ranks is \[5\]"),
    "too_few": (lambda c: c.update(num_micro_batches=1), "num_micro_batches is 1, expected 2 to 8"),
    "too_many": (lambda c: c.update(num_micro_batches=10**9), "expected 2 to 8"),
}


@pytest.mark.parametrize("what", [*some([*STALE], 3), *some([*BROKEN], 2)])
def test_one_that_does_not_fit_is_refused_if_it_must_be_used_else_planned_again(
    file: Path, what: str, lines: Lines
) -> None:
    """The new one is not for the old run; a copy of what a person has written is kept."""
    is_stale, changes = what in STALE, {}
    if is_stale:
        changes, words = STALE[what]
    else:
        change, words = BROKEN[what]
        edit(file, change)
    before = file.read_bytes()
    with pytest.raises(
        DeploymentError, match=f"(?s)is stale: .*{words}.*load_deployment='auto'" if is_stale else words
    ):
        start(load_deployment=True, **changes)
    assert file.read_bytes() == before
    start(**changes)
    (told,) = (line for line in lines() if ("planning again: " if is_stale else "a copy is kept") in line)
    assert re.search(words, told) and file.read_bytes() != before
    assert is_stale or Path(f"{file}.damaged").read_bytes() == before
    start(load_deployment=True, **changes)


def test_one_that_must_be_used_must_be_there_and_false_never_reads_it(file: Path, lines: Lines) -> None:
    file.write_text("no JSON")
    start(load_deployment=False, save_deployment=False)
    assert file.read_text() == "no JSON"
    assert not any("deployment" in line for line in lines())
    with pytest.raises(DeploymentError, match=r"nothing\.json cannot be read"):
        start(load_deployment=True, deployment_file="nothing.json")


def test_edited_by_hand_it_is_used(file: Path, no_measuring: None) -> None:
    edit(file, two_stages)
    plan = start(load_deployment=True)
    assert [stage.ranks for stage in plan.stages] == [(1,), (0,)]
    assert plan.num_micro_batches == 4


@pytest.mark.parametrize("act", some(["trace", "measure", "make_plan", "save"], 2))
def test_a_failure_leaves_it_unharmed(file: Path, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MeasureError("the story's error")

    before, others = file.read_bytes(), sorted(file.parent.iterdir())
    files = {"trace": "session.traces", "measure": "session.measuring", "save": "planner.deployment"}
    monkeypatch.setattr(f"autovaruna.{files.get(act, 'session.preparation')}.{act}", fail)
    with pytest.raises(MeasureError, match="the story's error"):
        start(width=16)
    assert (file.read_bytes(), sorted(file.parent.iterdir())) == (before, others)
