"""Holds accelerate's loop over ranks to plain accelerate on one process, and the default group to the ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integrations import same_weights
from tests.mpi.launch import run_on_forks

MISSING = [name for name in ("accelerate", "torchmetrics") if find_spec(name) is None]
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")]
TARGET = "tests.integrations.with_accelerate"


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    steps = expected["steps"][-len(found["steps"]) :]
    assert found["steps"] == [pytest.approx(step, rel=1e-5) for step in steps]
    assert found["predictions"] == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in expected["predictions"]]
    assert found["is_whole"]


def test_an_accelerate_loop_trains_saves_and_resumes_as_plain(tmp_path: Path) -> None:
    (expected,), folder = run_on_forks(1, f"{TARGET}:train", tmp_path / "plain", 0), tmp_path / "ranks"
    check(run_on_forks(2, f"{TARGET}:train", folder, 2)[0], expected)
    found, plain = (load_file(each / "model" / "model.safetensors") for each in (folder, tmp_path / "plain"))
    assert same_weights(found, plain)
    check(run_on_forks(3, f"{TARGET}:train", folder, 3, True)[1], expected)


def test_an_unmodified_gpt2_trains_in_bf16_as_plain(tmp_path: Path) -> None:
    """Once, a key-value cache among the outputs was refused, and tied weights ended save_state."""
    (expected,) = run_on_forks(1, f"{TARGET}:train_gpt2", str(tmp_path / "plain"), 0)
    assert run_on_forks(2, f"{TARGET}:train_gpt2", str(tmp_path / "ranks"), 2)[0] == pytest.approx(expected, rel=1e-2)


def test_libraries_see_the_ranks_of_mpirun() -> None:
    found = run_on_forks(2, f"{TARGET}:group_on_ranks")
    assert [rank["group"] for rank in found] == [(0, 2), (1, 2)]
    assert [rank["sampled"] for rank in found] == [[0, 2, 4, 6], [1, 3, 5, 0]]
    assert all(rank["mean"] == 0.5 and rank["processes"] == 2 for rank in found)
    assert [rank["variables"]["LOCAL_RANK"] for rank in found] == ["0", "1"]
    assert len({rank["variables"]["MASTER_PORT"] for rank in found}) == 1


def test_an_evaluation_on_the_main_process_alone_ends() -> None:
    """Once, it waited for ever: the other ranks were in a barrier of torch's, which nobody could see."""
    for text in run_on_forks(2, f"{TARGET}:evaluate_on_first"):
        assert 'rank 0 is in "reading the model\'s inputs"' in text
        assert "rank 1 is in 'torch.distributed.barrier()'" in text


def test_what_cannot_be_joined_is_refused() -> None:
    other, unknown, lonely = run_on_forks(2, f"{TARGET}:refusals")[1]
    assert "rank 0 of 1; expected rank 1 of 2" in other and "got backend 'mpi'" in unknown
    assert "accelerator.prepare(model, optimizer)" in lonely
