"""Runs the examples as a user does; each asserts its own result."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.mpi.launch import QUIET, ROOT, find_mpirun, mpirun_command, run_group
from tests.products import WHOLE

EXAMPLES = ROOT / "examples"
QUICK = {"AUTOVARUNA_PROFILE_ITERATIONS": "1"}


def run(name: str, num_ranks: int, directory: Path) -> str:
    """Runs an example in a directory and returns what it printed."""
    script = EXAMPLES / f"{name}.py"
    return start([sys.executable, str(script)] if num_ranks == 1 else mpirun_command(num_ranks, script), directory)


def start(command: list[str], directory: Path) -> str:
    """Runs a command in a directory and returns what it printed."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, **QUIET, **QUICK, "PYTHONPATH": path}
    done = run_group(command, 500, variables, directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ALONE = ("finetune_hf", "varuna_bert", "tutorial", "train_digits", "varuna_gpt")
MORE = [("finetune_hf", 2), *((name, 1) for name in ALONE)]  # three of these are run by tests/test_docs.py as well


@pytest.mark.parametrize(("name", "num_ranks"), [("train_digits", 2), *MORE * WHOLE])
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
def test_examples_run_under_the_launcher(name: str, options: list[str], arguments: list[str], tmp_path: Path) -> None:
    find_mpirun()
    (tmp_path / "machines").write_text("localhost\n")
    launcher = [sys.executable, "-m", "autovaruna.run_varuna", "--machine_list", "machines", *options]
    assert "[0]" in start([*launcher, str(EXAMPLES / f"{name}.py"), *arguments], tmp_path)


@pytest.mark.skipif(not WHOLE, reason="tests/test_docs.py follows a tutorial: make test-whole")
def test_three_ranks_run_the_tutorial(tmp_path: Path) -> None:
    assert "3 rank(s) trained the same weights" in run("tutorial", 3, tmp_path)


def test_examples_are_short() -> None:
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text().splitlines()) < 80, f"{file.name} has 80 lines or more"
