"""Checkpoints of Varuna's interface: written on one grid, loaded on another, dropout and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autovaruna.errors import CheckpointError
from autovaruna.varuna import Varuna
from tests.products import some
from tests.varuna.scripts import GRIDS, QUIET, batch, close, net, on_ranks, steps, wrap


def run(grid: str, first: int, last: int, folder: Path | None = None, **how: Any) -> list[Any]:
    """Trains from a step to another, loads before if that is not the first, and saves after if there is a folder."""
    num_ranks, stage_map = GRIDS[grid]

    def script(world: Any) -> Any:
        dropout = how.get("dropout", 0.0)
        model = wrap(stage_map, 8, None, num_micro_batches=4, dropout=dropout, fp16=how.get("fp16", False))
        if first:
            model.load_checkpoint(folder, first)
        assert model.iteration == first
        losses = steps(model, range(first, last))
        if folder is not None and not first:
            model.checkpoint(folder, tempdir=how.get("tempdir"), shard=how.get("shard", False), on_demand=True)
        return losses, model.get_loss_scale()

    return on_ranks(num_ranks, script)


RUNS = [("grid", "unequal", 0.0), ("two stages", "grid", 0.0), ("one", "two stages", 0.3)]
RUNS += [("unequal", "three stages", 0.0)]


@pytest.mark.parametrize(("source", "target", "dropout"), some(RUNS, 2))
def test_a_run_goes_on_on_any_other_grid(source: str, target: str, dropout: float, tmp_path: Path) -> None:
    """With dropout, micro-batches must be the same: one with replicas has others."""
    whole = run("one", 0, 4, dropout=dropout)[0][0]
    begun = run(source, 0, 2, tmp_path / "store", tempdir=str(tmp_path), shard=True, dropout=dropout)[0][0]
    assert close(begun + run(target, 2, 4, tmp_path / "store", dropout=dropout)[0][0], whole)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    saved = run("two stages", 0, 2, tmp_path / "store", fp16=True)[0][1]
    assert run("one", 2, 2, tmp_path / "store", fp16=True)[0][1] == saved < 2**20


def test_a_checkpoint_that_is_not_there_is_an_error_or_the_newest_is_loaded(tmp_path: Path, caplog: Any) -> None:
    """Without an optimizer it is loaded for its weights alone, which is said."""
    run("one", 0, 1, tmp_path)
    model = wrap(None)
    with pytest.raises(CheckpointError):
        model.load_checkpoint(tmp_path, 5)
    model.load_checkpoint(tmp_path, 5, check_complete=False)
    assert model.iteration == 1
    model = Varuna(net(), None, batch, 8, None, **QUIET)
    model.load_checkpoint(tmp_path, 1)
    assert "without the optimizer's state" in caplog.text
