"""Holds that the newest checkpoint is the one that was written last, and that jobs leave each other's alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch import nn

from autovaruna import AutoVaruna, CheckpointError
from autovaruna.checkpoint import folder, save
from autovaruna.checkpoint.manifest import MANIFEST
from autovaruna.checkpoint.source import choose
from autovaruna.ranks.environment import single_world
from tests.checkpoint.test_damage import trained
from tests.hosts.emulation import wait_for


@pytest.mark.parametrize(
    ("steps", "keep", "expected"),
    [
        ("5 10", None, "10 5"),
        ("5 10 6 7", None, "7.branch1 6.branch1 10 5"),
        ("5 10 6 7", 2, "7.branch1 6.branch1"),
        ("5 10 6 7 10 11", None, "11.branch1 10.branch1 7.branch1 6.branch1 5"),
        ("5 10 6 7 5", 3, "5.branch2 7.branch1 6.branch1"),
        ("5 10 10 10 11", None, "11 10.2 5"),
        ("5 3 3 4", None, "4.branch1 3.branch1.1 5"),
        ("5 3 3 4 1", 1, "1.branch2"),
    ],
)
def test_the_newest_is_what_was_written_last(steps: str, keep: int | None, expected: str, tmp_path: Path) -> None:
    """Steps are saved one after the other; expected are the names of what is there then, the newest first."""
    model = trained()
    for count, step in enumerate(map(int, steps.split())):
        model.save_checkpoint(tmp_path, step=step, keep=keep, extra=count)
        found = model.load_checkpoint(tmp_path)
        assert (found.step, found.extra) == (step, count)
    assert [saved.path.name[5:].lstrip("0") for saved in folder.saved_in(tmp_path)] == expected.split()


def test_a_step_is_that_of_the_last_branch_and_damage_leads_to_what_was_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = trained()
    for step, extra in ((5, "old"), (10, "old"), (6, "new"), (5, "newest")):
        model.save_checkpoint(tmp_path, step=step, extra=extra)
    assert model.load_checkpoint(tmp_path, step=5).extra == "newest"
    (tmp_path / "step-00000005.branch2" / MANIFEST).write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert model.load_checkpoint(tmp_path).step == 6
    assert "going back" in caplog.text
    model.save_checkpoint(tmp_path, step=7)
    assert model.load_checkpoint(tmp_path).step == 7


def save_slowly(place: Path) -> None:
    """Saves to the folder ``saved``, once there is a file ``go``."""
    real = save.chunks_of
    save.chunks_of = lambda rows: (wait_for((place / "go").exists, "go", 60.0), real(rows))[1]
    model = AutoVaruna(nn.Linear(3, 3))
    model.save_checkpoint(place / "saved", step=1, background=True)
    model.wait_checkpoint()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[BaseProcess]:
    """Returns another job, which has begun to save."""
    process = multiprocessing.get_context("fork").Process(target=save_slowly, args=(tmp_path,))
    process.start()
    wait_for(lambda: not process.is_alive() or any(tmp_path.glob("saved/.step*/.rank*")), "its save")
    yield process
    process.kill()
    process.join()


def test_a_second_job_that_saves_to_a_folder_is_refused(
    tmp_path: Path, other: BaseProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the two took turns as the newest, and ``keep`` of each removed what the other had saved."""
    monkeypatch.setattr(folder, "_PATIENCE_SECONDS", 0.1)
    model, root = trained(), tmp_path / "saved"
    with pytest.raises(CheckpointError, match=rf"Another job saves to {root}: process {other.pid} on .* since "):
        model.save_checkpoint(root, step=2)
    with caplog.at_level(logging.INFO), pytest.raises(CheckpointError, match="There is no checkpoint"):
        model.load_checkpoint(root)
    assert f"another job saves to {root} (process {other.pid} on " in caplog.text
    (tmp_path / "go").touch()
    other.join(60)
    assert other.exitcode == 0
    assert [saved.step for saved in folder.saved_in(root)] == [1]
    model.save_checkpoint(root, step=2)
    assert [saved.step for saved in folder.saved_in(root)] == [2, 1]


def test_a_claim_ends_with_its_process_and_no_fork_of_it_has_it(tmp_path: Path) -> None:
    """What a job that was killed has forked, as workers that load data, lives on for a while."""
    script = (
        "import os, signal, sys, time, torch; from autovaruna import AutoVaruna\n"
        "AutoVaruna(torch.nn.Linear(3, 3)).save_checkpoint(sys.argv[1], step=1)\n"
        "os.close(1) or time.sleep(60) if os.fork() == 0 else os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True,
                          cwd=Path(__file__).parents[2]) as job:  # fmt: skip
        assert job.wait(60) == -signal.SIGKILL
        trained().save_checkpoint(tmp_path, step=2)
        os.killpg(job.pid, signal.SIGKILL)
    assert [saved.step for saved in folder.saved_in(tmp_path)] == [2, 1]


def test_what_a_killed_job_leaves_goes(tmp_path: Path, other: BaseProcess) -> None:
    other.kill()
    other.join(60)
    assert list(tmp_path.glob("saved/.step*"))
    trained().save_checkpoint(tmp_path / "saved", step=2)
    assert [each.name for each in (tmp_path / "saved").glob("*step-*")] == ["step-00000002"]


def test_two_models_of_one_program_leave_each_other_s_alone(tmp_path: Path) -> None:
    first, second = trained(), trained()
    first.save_checkpoint(tmp_path, step=1, background=True)
    second.save_checkpoint(tmp_path, step=2, background=True)
    first.wait_checkpoint()
    second.wait_checkpoint()
    assert len(list(tmp_path.glob("*step-*"))) == 2


def test_what_is_read_stays_until_it_has_been(tmp_path: Path) -> None:
    """Once, a job that evaluated the newest one failed when training saved the next, and removed it."""
    model = trained()
    model.save_checkpoint(tmp_path, step=1)
    with ExitStack() as locks:
        source = choose(single_world(), tmp_path, "latest", locks)
        for step in (2, 3):
            model.save_checkpoint(tmp_path, step=step, keep=1)
        assert trained().load_checkpoint(source.path).step == 1
    model.save_checkpoint(tmp_path, step=4, keep=1)
    assert [each.name for each in tmp_path.glob("*step-*")] == ["step-00000004"]


def test_an_old_one_that_cannot_be_removed_is_told_and_the_new_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: AutoVaruna = trained()
    model.save_checkpoint(tmp_path, step=1)
    real = os.rename

    def refuse(old: Path, new: Path) -> None:
        if not Path(old).name.startswith("."):
            raise PermissionError(1, "not yours")
        real(old, new)

    monkeypatch.setattr(os, "rename", refuse)
    with caplog.at_level(logging.WARNING):
        model.save_checkpoint(tmp_path, step=2, keep=1)
    assert "cannot be removed: not yours" in caplog.text
    assert model.load_checkpoint(tmp_path).step == 2
