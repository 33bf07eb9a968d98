"""Holds that a plan predicts the memory of each rank, by the settings and the means of the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, mpirun
from tests.products import WHOLE

sys.path.insert(0, str(ROOT / "benchmarks"))

from prediction import SETTINGS, TUNABLES, Found


@pytest.mark.parametrize(("name", "num_turns"), [("mlp, 1f1b", int(WHOLE)), *[("mlp, whole batch", 0)] * WHOLE])
def test_predicted_memory_is_the_resident_set(name: str, num_turns: int, tmp_path: Path) -> None:
    """Bytes are within 15 %, as heaps differ; of seconds, which depend on who else runs, only the order is held."""
    place = next(place for place, setting in enumerate(SETTINGS) if setting.name == name)
    output = tmp_path / "found.json"
    arguments = (f"--rank={place}", "--steps=3", f"--turns={num_turns}", "--again=0", f"--output={output}")
    env = {"PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": TUNABLES}
    mpirun(2, ROOT / "benchmarks" / "prediction.py", *arguments, env=env)
    found = Found.read(output.read_text(encoding="utf-8"))
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=0.15)
    assert num_turns == 0 or 0.01 < found.time_error + 1 < 100
