"""Ranks that save or load different checkpoints are told, rather than given rank 0's."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from autovaruna import AutoVaruna, CheckpointError
from autovaruna.runtime.world import World
from tests.ranks import run_ranks


def test_other_steps_are_told(tmp_path: Path) -> None:
    def be_rank(world: World) -> None:
        model = AutoVaruna(nn.Linear(4, 1))
        with pytest.raises(CheckpointError, match=r"step is 1 on rank 0, 2 on rank 1"):
            model.save_checkpoint(tmp_path, step=1 + world.rank)
        with pytest.raises(CheckpointError, match=r"background is False on rank 0, True on rank 1"):
            model.save_checkpoint(tmp_path, step=1, background=bool(world.rank))
        model.save_checkpoint(tmp_path, step=1)
        with pytest.raises(CheckpointError, match=r"step is 'latest' on rank 0, 1 on rank 1"):
            model.load_checkpoint(tmp_path, step=1 if world.rank else "latest")
        assert model.load_checkpoint(tmp_path, step=1).step == 1

    run_ranks(2, be_rank)


def test_other_folders_and_numbers_to_keep_are_told(tmp_path: Path) -> None:
    """One folder may go by several names."""
    (tmp_path / "link").symlink_to(tmp_path / "0")
    (tmp_path / "0").mkdir()

    def be_rank(world: World) -> None:
        model = AutoVaruna(nn.Linear(4, 1))
        own, same = tmp_path / str(world.rank), tmp_path / ("link" if world.rank else "0")
        with pytest.raises(CheckpointError, match=r"dir is \S+/0 on rank 0, \S+/1 on rank 1"):
            model.save_checkpoint(own, step=1)
        with pytest.raises(CheckpointError, match=r"keep is None on rank 0, 1 on rank 1"):
            model.save_checkpoint(same, step=1, keep=world.rank or None)
        model.save_checkpoint(same, step=1, keep=1)
        with pytest.raises(CheckpointError, match=r"dir is \S+/0 on rank 0, \S+/1 on rank 1"):
            model.load_checkpoint(own)
        assert model.load_checkpoint(same).step == 1

    run_ranks(2, be_rank)
