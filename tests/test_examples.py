"""Runs the examples as a user does; each asserts its own result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.products import WHOLE

EXAMPLES = Path(__file__).parents[1] / "examples"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
QUICK = {"AUTOVARUNA_PROFILE_ITERATIONS": "1"}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def run(name: str, num_ranks: int, directory: Path) -> str:
    """Runs an example in a directory and returns what it printed."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    if num_ranks > 1:
        command = [mpirun(), "-np", str(num_ranks), "--oversubscribe", "--bind-to", "none", *command]
    return start(command, directory)


def mpirun() -> str:
    return MPIRUN or pytest.skip("mpirun is not there")


def start(command: list[str], directory: Path) -> str:
    """Runs a command in a directory and returns what it printed."""
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **ROOT, **QUICK, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


USUAL = [("train_digits", 2), ("finetune_hf", 1), ("varuna_bert", 1), ("tutorial", 1)]
MORE = [("finetune_hf", 2), ("train_digits", 1), ("varuna_gpt", 1)]


@pytest.mark.parametrize(("name", "num_ranks"), USUAL + MORE * WHOLE)
def test_an_example_holds_its_own_assertions(name: str, num_ranks: int, tmp_path: Path) -> None:
    assert run(name, num_ranks, tmp_path)


@pytest.mark.skipif(not WHOLE, reason="tests/mpi/test_varuna.py has one of them: make test-whole")
@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        ("varuna_bert", ["--gpus_per_node", "2", "--batch_size", "12", "--nstages", "2"], ["--fp16"]),
        ("varuna_gpt", ["--gpus_per_node", "4", "--batch_size", "10", "--nstages", "2", "--chunk_size", "2"], []),
    ],
)
def test_an_example_in_varuna_s_style_runs_under_the_launcher(
    name: str, options: list[str], arguments: list[str], tmp_path: Path
) -> None:
    mpirun()
    (tmp_path / "machines").write_text("localhost\n")
    launcher = [sys.executable, "-m", "autovaruna.run_varuna", "--machine_list", "machines", *options]
    assert "[0]" in start([*launcher, str(EXAMPLES / f"{name}.py"), *arguments], tmp_path)


@pytest.mark.skipif(not WHOLE, reason="tests/test_docs.py follows a tutorial: make test-whole")
def test_three_ranks_run_the_tutorial(tmp_path: Path) -> None:
    assert "3 rank(s) trained the same weights" in run("tutorial", 3, tmp_path)


def test_examples_are_short() -> None:
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text().splitlines()) < 80, f"{file.name} has 80 lines or more"
