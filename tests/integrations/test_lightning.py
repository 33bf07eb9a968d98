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
    (expected,) = run_on_forks(1, f"{TARGET}:train_on_ranks", str(tmp_path / "plain"), 0)
    found = run_on_forks(2, f"{TARGET}:train_on_ranks", str(tmp_path), 2)[0]
    for row, plain, one in zip(found, expected, (True, False), strict=True):
        assert row["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert row["test"] == pytest.approx(plain["test"], rel=1e-5)
        with (tmp_path / str(one) / "csv" / "metrics.csv").open() as file:
            logged = [each for each in csv.DictReader(file) if each.get("autovaruna/learning_rate")]
        assert len(logged) == 4  # steps of the optimizer, of two batches each
        assert all(float(each["autovaruna/learning_rate"]) == 0.01 for each in logged)
        assert all(float(each["autovaruna/samples_per_second"]) > 0 for each in logged)
        files = (folder / str(one) / "last.ckpt" for folder in (tmp_path, tmp_path / "plain"))
        assert same_weights(*(torch.load(file, weights_only=False)["state_dict"] for file in files))
    resumed = run_on_forks(3, f"{TARGET}:train_on_ranks", str(tmp_path), 3, True)[0]
    for row, plain in zip(resumed, expected, strict=True):
        assert row["losses"] == pytest.approx(plain["losses"][-len(row["losses"]) :], rel=1e-5)
