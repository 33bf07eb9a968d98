"""A rank looks whether the others of its host are there, before it starts MPI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autovaruna.errors import RankError
from autovaruna.runtime import launcher

JOB = {"PMIX_NAMESPACE": "job@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "0"}
LAUNCHER = 7


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns processes as the system shows them: a launcher, and this one below it."""
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 0.0)
    show(tmp_path, LAUNCHER, "prterun", 1, {})
    show(tmp_path, os.getpid(), "python (x)", LAUNCHER, JOB)
    return tmp_path


def show(processes: Path, number: int, name: str, parent: int, variables: dict[str, str]) -> None:
    folder = processes / str(number)
    folder.mkdir()
    (folder / "stat").write_text(f"{number} ({name}) S {parent} 0 0")
    (folder / "environ").write_text("\0".join(f"{name}={value}" for name, value in variables.items()))


def test_a_rank_that_is_gone_is_told(processes: Path) -> None:
    show(processes, 8, "python", LAUNCHER, JOB | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "another@1"})
    with pytest.raises(RankError, match="1 of the 2 ranks on this host ended"):
        launcher.expect_siblings(launcher.OF_OPEN_MPI, JOB, processes)


def test_ranks_that_are_there_are_seen(processes: Path) -> None:
    show(processes, 8, "python", LAUNCHER, JOB | {"PMIX_RANK": "1"})
    launcher.expect_siblings(launcher.OF_OPEN_MPI, JOB, processes)


def test_nothing_is_said_where_nothing_can_be_known(processes: Path, tmp_path: Path) -> None:
    """Another launcher, or one that is outside of this container, where other ranks may be, too."""
    launcher.expect_siblings(launcher.OF_OPEN_MPI, {}, processes)
    (processes / str(LAUNCHER) / "stat").write_text(f"{LAUNCHER} (sh) S 1 0 0")
    launcher.expect_siblings(launcher.OF_OPEN_MPI, JOB, processes)
    launcher.expect_siblings(launcher.OF_OPEN_MPI, JOB, tmp_path / "nowhere")


def test_ranks_of_torchrun_look_for_each_other(processes: Path) -> None:
    """Two jobs may have one name, but not one port."""
    job = {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "LOCAL_WORLD_SIZE": "2",
    }
    show(processes, 8, "python", 1, job | {"RANK": "0"})
    show(processes, 9, "python", 1, job | {"RANK": "1", "MASTER_PORT": "2"})
    with pytest.raises(RankError, match="1 of the 2 ranks on this host ended"):
        launcher.expect_siblings(launcher.OF_TORCHRUN, job | {"RANK": "0"}, processes)
    show(processes, 10, "python", 1, job | {"RANK": "1"})
    launcher.expect_siblings(launcher.OF_TORCHRUN, job | {"RANK": "0"}, processes)
