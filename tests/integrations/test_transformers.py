"""Holds Trainer over ranks to plain Trainer with the global batch: losses, norms, metrics, files, on any launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integrations import same_weights
from tests.mpi.launch import run_on_forks
from tests.mpi.test_torchrun import torchrun

MISSING = [name for name in ("accelerate", "peft", "transformers") if find_spec(name) is None]
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")]
TARGET = "tests.integrations.with_transformers"
CASES = ["usual", "lora", "translation", "answers", "regression", "loss of outputs", "loss function"]
CLOSE = {"rel": 1e-5, "abs": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> list[dict[str, Any]]:
    """What two ranks of mpirun log in each case."""
    return run_on_forks(2, f"{TARGET}:train_all", CASES, folder, 2, timeout=500)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """What plain Trainer logs in each case."""
    return run_on_forks(1, f"{TARGET}:train_all", CASES, folder / "plain", 0, timeout=500)[0]


def is_like_plain(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    steps = {row["step"] for row in found}
    assert found == [pytest.approx(row, **CLOSE) for row in expected if row["step"] in steps]


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_evaluate_and_save_as_plain_trainer(case: str, folder: Path, on_two: Any, plain: Any) -> None:
    is_like_plain(on_two[0][case], plain[case])
    file = "adapter_model.safetensors" if case == "lora" else "model.safetensors"
    files = (each / "final" / file for each in (folder / case, folder / "plain" / case))
    assert same_weights(*map(load_file, files), 1e-4)
    assert len(list((folder / case).glob("checkpoint-*"))) == (1 if case == "lora" else 2)


@pytest.mark.usefixtures("on_two")
def test_a_checkpoint_goes_on_under_torchrun_and_in_plain_trainer(folder: Path, plain: dict[str, Any]) -> None:
    checkpoint, place = str(min((folder / "usual").glob("checkpoint-*"))), folder / "torchrun"
    place.mkdir()
    done = torchrun(3, TARGET, place, checkpoint)
    assert done.returncode == 0, done.stderr
    is_like_plain(json.loads((place / "found0.json").read_text()), plain["usual"])
    is_like_plain(run_on_forks(1, f"{TARGET}:train", "usual", folder / "again", 0, checkpoint)[0], plain["usual"])


def test_a_loss_of_outputs_is_refused_where_losses_of_ranks_are_added(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert found["outer"].startswith("ConfigError") and "'reduction': 'mean'" in found["outer"]


def test_importing_the_package_imports_no_such_library() -> None:
    names = ["transformers", "accelerate", "lightning", "peft", "torchmetrics"]
    code = f"import autovaruna, sys; autovaruna.AutoVaruna; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
