"""Holds what a script does when a scheduler takes its machine back: all ranks save at one step, and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autovaruna.elastic.rank_script import SAVED
from tests.mpi.launch import mpirun
from tests.products import some

SCRIPT = "tests.mpi.preempted"
pytestmark = pytest.mark.parametrize("num_ranks", some([3, 1], 1))


def test_all_ranks_stop_at_one_step(num_ranks: int, tmp_path: Path) -> None:
    """Signals come to two of three ranks, at two moments."""
    done = mpirun(num_ranks, SCRIPT, tmp_path, "flag", is_warm=True)
    said = re.findall(r"rank \d saved (\d+)", done.stdout)
    assert len(said) == num_ranks and len(set(said)) == 1
    assert (tmp_path / f"step-{int(said[0]):08d}").is_dir()


def test_a_setting_saves_and_ends_with_a_status_of_its_own(num_ranks: int, tmp_path: Path) -> None:
    done = mpirun(num_ranks, SCRIPT, tmp_path, "setting", check=False, is_warm=True)
    assert done.returncode == SAVED, done.stderr
    (saved,) = tmp_path.glob("step-*")
    assert f"got SIGUSR1: saved step {int(saved.name[5:])}, and end with status {SAVED}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("method", ["fork"])
def test_so_it_is_where_workers_of_a_loader_get_the_signal_as_well(method: str, num_ranks: int, tmp_path: Path) -> None:
    """A worker that died would end its rank with an error, in the midst of a step."""
    done = mpirun(num_ranks, SCRIPT, tmp_path, method, check=False, is_warm=method == "fork")
    assert done.returncode == SAVED, done.stderr
    assert len([*tmp_path.glob("step-*")]) == 1 and "killed by signal" not in done.stderr
