"""Holds checkpoints of ranks that are processes: any number of them goes on, and none holds more than its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.mpi.checkpoint import call, gpt2
from tests.mpi.launch import run_on_forks, run_on_ranks, warm

MODULE = "tests.mpi.checkpoint"


def test_other_numbers_of_ranks_go_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run_on_ranks(2, f"{MODULE}:train", str(tmp_path), 2, False, 5)
    assert (tmp_path / "step-00000003").is_dir()
    for losses in run_on_ranks(3, f"{MODULE}:train", str(tmp_path), 3, True, 2):
        assert losses == whole[0][3:]


def test_a_model_on_meta_loads_in_parts_from_a_folder_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = gpt2(8, 768).eval()
    net.save_pretrained(tmp_path, max_shard_size="50MB")  # type: ignore[operator]
    expected = call(net)
    warm().prepare(f"{MODULE}:gpt2", 1, 4)  # which imports the library
    for loss, peak, whole in run_on_forks(2, f"{MODULE}:load_on_meta", str(tmp_path), 8, 768):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert peak < 0.6 * whole, f"{peak / whole:.2f} of the whole model"
