"""Deployments in use: saved, used, stale, edited by hand, broken; on ranks that are threads of this process."""

from __future__ import annotations

import copy
import errno
import io
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, DeploymentError, MeasureError
from autovaruna.planner.deployment import Fingerprint, deployment_of, load, save
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.runtime.world import World
from autovaruna.session import measuring
from tests.planner.cases import make_problem
from tests.ranks import run_ranks


class Net(nn.Module):
    """Has a loss, and places to be cut."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.middle(self.first(x))))
        return out.square().mean()


def start(num_ranks: int = 2, width: int = 8, batch: int = 4, **settings: Any) -> Plan:
    """Starts a run, as a script does, and trains for a step; returns the plan."""
    net = Net(width)

    def be_rank(_: World) -> Plan:
        mine = copy.deepcopy(net)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        model = AutoVaruna(mine, optimizer, progress=False, **settings)
        model(torch.ones(batch, 4)).backward()
        assert model.plan is not None
        return model.plan

    return run_ranks(num_ranks, be_rank)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Returns what the default of `start` saves."""
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
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.DEBUG, "autovaruna.session")  # one that no rank sets
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any, **__: Any) -> None:
        pytest.fail("measured")

    monkeypatch.setattr(measuring, "measure", measure)


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
def test_a_second_start_measures_nothing_and_says_so(
    file: Path, no_measuring: None, mode: Any, lines: Callable[[], list[str]]
) -> None:
    before = file.read_bytes()
    start(load_deployment=mode)
    assert f"using the saved deployment {file}" in lines()
    assert file.read_bytes() == before


STALE: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"width": 16}, "the model changed"),
    "num_ranks": ({"num_ranks": 3}, r"the number of ranks changed \(2 -> 3\)"),
    "batch": ({"batch": 8}, r"global batch changed \(8 -> 16\)"),
    "memory": ({"memory_limit_bytes": "1GiB"}, "the memory limit changed"),
    "setting": ({"num_micro_batches": 4}, r"setting num_micro_batches changed \(0 -> 4\)"),
}


@pytest.mark.parametrize("what", STALE)
def test_a_stale_one_is_refused_if_it_must_be_used(file: Path, what: str) -> None:
    changes, words = STALE[what]
    before = file.read_bytes()
    with pytest.raises(DeploymentError, match=f"(?s)is stale: .*{words}.*load_deployment='auto'"):
        start(load_deployment=True, **changes)
    assert file.read_bytes() == before


@pytest.mark.parametrize("what", STALE)
def test_a_stale_one_is_planned_again(file: Path, what: str, lines: Callable[[], list[str]]) -> None:
    changes, words = STALE[what]
    start(**changes)
    told = [line for line in lines() if line.startswith("planning again: ")]
    assert len(told) == 1
    with pytest.raises(DeploymentError):
        start(load_deployment=True)  # the new one is not for the old run
    start(load_deployment=True, **changes)
    assert re.search(words, told[0])


def test_every_rank_gets_the_refusal(file: Path) -> None:
    def be_rank(_: World) -> str:
        with pytest.raises(DeploymentError) as raised:
            AutoVaruna(Net(16), load_deployment=True)(torch.ones(4, 4))
        return str(raised.value)

    assert all("the model changed" in text for text in run_ranks(2, be_rank))


def test_one_that_must_be_used_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"nothing\.json cannot be read"):
        start(load_deployment=True, deployment_file=str(tmp_path / "nothing.json"))


def test_a_run_goes_on_where_none_can_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was planned was once given up for a folder that nobody may write to."""
    assert start(deployment_file=str(tmp_path)).num_ranks == 2
    assert f"the plan is not kept: the deployment cannot be written to {tmp_path}: " in caplog.text


def test_false_never_reads_it(file: Path, lines: Callable[[], list[str]]) -> None:
    file.write_text("no JSON")
    start(load_deployment=False, save_deployment=False)
    assert file.read_text() == "no JSON"
    assert not any("deployment" in line for line in lines())


def test_edited_by_hand_it_is_used(file: Path, no_measuring: None) -> None:
    edit(file, two_stages)
    plan = start(load_deployment=True)
    assert [stage.ranks for stage in plan.stages] == [(1,), (0,)]
    assert plan.num_micro_batches == 4


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "cut": (lambda c: c["stages"].append(c["stages"][0] | {"cut": "lost"}), "cut 'lost' names no block"),
    "ranks": (lambda c: c["stages"][0].update(ranks=[5]), r"stages\[0\].ranks is \[5\]"),
    "too_few": (lambda c: c.update(num_micro_batches=1), "num_micro_batches is 1, expected 2 to 8"),
    "too_many": (lambda c: c.update(num_micro_batches=10**9), "expected 2 to 8"),
    "key": (lambda c: c.pop("schedule"), "schedule is missing"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_one_is_refused_if_it_must_be_used(file: Path, what: str) -> None:
    change, words = BROKEN[what]
    edit(file, change)
    before = file.read_bytes()
    with pytest.raises(DeploymentError, match=words):
        start(load_deployment=True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("what", ["cut", "too_few"])
def test_a_broken_one_is_planned_again_and_a_copy_is_kept(
    file: Path, what: str, lines: Callable[[], list[str]]
) -> None:
    change, words = BROKEN[what]
    edit(file, change)
    before = file.read_bytes()
    start()
    assert any(words in line and "a copy is kept" in line for line in lines())
    assert Path(f"{file}.damaged").read_bytes() == before
    start(load_deployment=True)


def test_what_cannot_be_read_or_copied_is_named(file: Path, lines: Callable[[], list[str]]) -> None:
    """Once, keeping a copy failed with a bare ``IsADirectoryError``."""
    file.unlink()
    file.mkdir()
    start()
    told = [
        f"{file} cannot be read: ",
        "no copy of it can be kept: ",
        f"the plan is not kept: the deployment cannot be written to {file}",
    ]
    assert all(any(said in line for line in lines()) for said in told)


def test_what_nobody_may_read_is_not_replaced(
    file: Path, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, a plan edited by hand was gone after the log had said that no copy of it could be kept."""
    before, real = file.read_bytes(), io.open

    def refuse(opened: Any, *args: Any, **kwargs: Any) -> Any:
        if os.fspath(opened) == str(file):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(opened, *args, **kwargs)

    for load_deployment in ("auto", False):
        with monkeypatch.context() as patch:
            patch.setattr(io, "open", refuse)
            start(load_deployment=load_deployment)
        assert file.read_bytes() == before
        assert any("is there, but cannot be read (Permission denied), so that" in line for line in lines())


def test_a_copy_of_a_damaged_one_is_a_new_file(file: Path, tmp_path: Path) -> None:
    """Once, its name was followed where somebody had made a link of it."""
    file.write_text("edited")
    file.chmod(0o600)
    (tmp_path / "other").write_text("of others")
    Path(f"{file}.damaged").symlink_to(tmp_path / "other")
    start()
    assert (tmp_path / "other").read_text() == "of others"
    copy = Path(f"{file}.damaged1")
    assert copy.read_text() == "edited" and copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("act", ["trace", "measure", "make_plan", "save"])
def test_a_failure_leaves_it_unharmed(file: Path, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MeasureError("the story's error")

    before, others = file.read_bytes(), sorted(file.parent.iterdir())
    room = {"trace": "traces", "measure": "measuring"}.get(act, "preparation")
    monkeypatch.setattr(f"autovaruna.session.{room}.{act}", fail)
    with pytest.raises(MeasureError, match="the story's error"):
        start(width=16)
    assert (file.read_bytes(), sorted(file.parent.iterdir())) == (before, others)


def test_it_is_never_half_written(tmp_path: Path) -> None:
    """Several runs save while one loads."""
    problem = make_problem(8, 3, 12, num_stages=3, skips=2)
    deployment = deployment_of(make_plan(problem), problem.graph, Fingerprint("graph", num_ranks=3))
    file = tmp_path / "deployment.json"
    save(file, deployment)

    def be_rank(world: World) -> int:
        for _ in range(50):
            save(file, deployment) if world.rank else load(file)
        return len(os.listdir(tmp_path))

    run_ranks(4, be_rank)
    assert os.listdir(tmp_path) == [file.name]
