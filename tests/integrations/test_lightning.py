"""Holds Lightning's Trainer over ranks to plain Lightning on one process: losses, tests, checkpoints."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.integrations import same_weights
from tests.mpi.launch import run_on_forks

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore"), needs_lightning]
TARGET = "tests.integrations.with_lightning"


def test_lightning_fits_tests_saves_and_resumes_as_plain(tmp_path: Path) -> None:
    (expected,) = run_on_forks(1, f"{TARGET}:train_and_test_all", str(tmp_path / "plain"), 0)
    found = run_on_forks(2, f"{TARGET}:train_and_test_all", str(tmp_path), 2)[0]
    for kind, plain in expected.items():
        row = found[kind]
        assert row["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert row["test"] == pytest.approx(plain["test"], rel=1e-5)
        with (tmp_path / kind / "csv" / "metrics.csv").open() as file:
            logged = [each for each in csv.DictReader(file) if each.get("autovaruna/learning_rate")]
        assert len(logged) == 4  # steps of the optimizer, of two batches each
        assert all(float(each["autovaruna/learning_rate"]) == 0.01 for each in logged)
        assert all(float(each["autovaruna/samples_per_second"]) > 0 for each in logged)
        files = (folder / kind / "last.ckpt" for folder in (tmp_path, tmp_path / "plain"))
        assert same_weights(*(torch.load(file, weights_only=False)["state_dict"] for file in files))
    resumed = run_on_forks(3, f"{TARGET}:train_and_test_all", str(tmp_path), 3, True)[0]
    for kind, plain in expected.items():
        row = resumed[kind]
        assert row["losses"] == pytest.approx(plain["losses"][-len(row["losses"]) :], rel=1e-5)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_steps_of_any_shape_train_and_log_as_plain(num_stages: int, tmp_path: Path) -> None:
    """Once, a step that called two children, or used a parameter of the module itself, was refused."""
    (expected,) = run_on_forks(1, f"{TARGET}:train_all", str(tmp_path / "plain"), None)
    found = run_on_forks(2, f"{TARGET}:train_all", str(tmp_path / "ranks"), {"num_stages": num_stages})
    for kind, plain in expected.items():
        row = found[0][kind]
        assert row["logged"] == pytest.approx(plain["logged"], rel=1e-5), kind
        assert all(same_weights(row[each], plain[each]) for each in ("weights", "saved")), kind
        assert found[1][kind]["logged"] == pytest.approx(row["logged"]), kind
        assert sum(row["traces"].values()) <= 6, kind  # and not one for each batch_idx


def test_what_lightning_cannot_have_is_said_in_its_words() -> None:
    used, evaluated, alone = run_on_forks(2, f"{TARGET}:refusals")[0]
    assert "training_step of Both computes with scale itself" in used and "batch_idx" in used
    assert "rank 0 is in 'state_dict" in alone and "torch.distributed.barrier()" in alone
    assert "call trainer.save_checkpoint(path) on every rank" in alone
    assert "planned for evaluation alone. Expected fit() first" in evaluated
