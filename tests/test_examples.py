"""Runs the examples as a user does; each asserts its own result."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.mpi.launch import QUIET, ROOT, mpirun_command, run_group
from tests.products import WHOLE

EXAMPLES = ROOT / "examples"
QUICK = {"AUTOVARUNA_PROFILE_ITERATIONS": "1"}


ALONE = ("finetune_hf", "varuna_bert", "tutorial", "train_digits", "varuna_gpt")
"""Three of these are run by tests/test_docs.py as well, one under the launcher by tests/mpi/test_varuna.py."""
MORE = [("finetune_hf", 2), ("tutorial", 3), *((name, 1) for name in ALONE)]


@pytest.mark.parametrize(("name", "num_ranks"), [("train_digits", 2), *MORE * WHOLE])
def test_an_example_holds_its_own_assertions(name: str, num_ranks: int, tmp_path: Path) -> None:
    script, path = EXAMPLES / f"{name}.py", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script)] if num_ranks == 1 else mpirun_command(num_ranks, script)
    done = run_group(command, 500, {**os.environ, **QUIET, **QUICK, "PYTHONPATH": path}, tmp_path)
    assert done.returncode == 0 and done.stdout, done.stdout + done.stderr


def test_examples_are_short() -> None:
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text().splitlines()) < 80, f"{file.name} has 80 lines or more"
