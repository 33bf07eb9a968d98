"""Holds that what is written in the background is of one moment, whatever the training does meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autovaruna import AutoVaruna
from autovaruna.checkpoint import save
from autovaruna.checkpoint.manifest import Bytes
from autovaruna.checkpoint.tensor_file import Rows
from tests.catalogue import CASES
from tests.checkpoint.test_damage import is_same, snapshot, step, trained
from tests.reference import adamw
from tests.session.training import on_ranks, pipeline

WIDTH = 1 << 19  # 12 MiB of weights, in several chunks


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each chunk take its time."""
    real = save.chunks_of

    def chunks(rows: Rows) -> Iterator[Bytes]:
        for chunk in real(rows):
            time.sleep(0.02)
            yield chunk

    monkeypatch.setattr(save, "chunks_of", chunks)


def is_saved(root: Path, number: int, expected: list[torch.Tensor]) -> bool:
    other = trained(seed=1, width=WIDTH)
    other.load_checkpoint(root, step=number)
    return is_same(other, expected)


@pytest.mark.usefixtures("slow")
def test_training_goes_on_meanwhile_whatever_changes(tmp_path: Path) -> None:
    """Steps, in-place changes, and changes that autograd does not see."""
    model = trained(width=WIDTH)
    for number in range(3):
        expected, states = snapshot(model), model.optimizer.state
        known = [{name: value.clone() for name, value in its.items()} for its in states.values()]
        model.save_checkpoint(tmp_path, step=number, background=True)
        step(model)
        next(iter(model.parameters())).data.mul_(0.5)
        next(iter(states.values()))["exp_avg"].numpy()[:] = 7
        step(model)
        model.wait_checkpoint()
        assert is_saved(tmp_path, number, expected)
        model.load_checkpoint(tmp_path, step=number)
        for then, now in zip(known, model.optimizer.state.values(), strict=True):
            assert all(torch.equal(value, now[name]) for name, value in then.items())


def test_the_call_and_steps_wait_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk stands still."""
    goes_on, real = threading.Event(), save.write_file
    monkeypatch.setattr(save, "write_file", lambda *args: (goes_on.wait(60), real(*args))[1])
    model = trained(width=WIDTH)
    expected = snapshot(model)
    model.save_checkpoint(tmp_path, step=1, background=True)
    step(model)
    assert not list(tmp_path.glob("step-*"))
    goes_on.set()
    model.wait_checkpoint()
    assert is_saved(tmp_path, 1, expected)


def test_without_memory_for_a_copy_files_are_written_at_once_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the ranks of a host take together counts."""
    case = CASES["chain"]
    barrier = threading.Barrier(2)

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model(**case.batch(7, 0)[1]).backward()
        optimizer.step()
        model.save_checkpoint(tmp_path, step=1)
        files = sorted((tmp_path / "step-00000001").glob("*.safetensors"))
        sizes = sum(each.stat().st_size for each in files)
        barrier.wait()
        monkeypatch.setattr(save, "available_bytes", lambda: sizes - 1.0)
        barrier.wait()
        model.save_checkpoint(tmp_path, step=2, background=True)
        assert (tmp_path / "step-00000002").is_dir()
        assert "So training waits until the files are written" in caplog.text
        barrier.wait()
        caplog.clear()
        monkeypatch.setattr(save, "available_bytes", lambda: sizes + 2.0 * (1 << 20))
        barrier.wait()
        model.save_checkpoint(tmp_path, step=3, background=True)
        assert "So training waits" not in caplog.text
        model.wait_checkpoint()

    on_ranks(pipeline(2), case, run, adamw)


@pytest.mark.usefixtures("slow")
def test_a_load_meanwhile_waits_and_one_of_other_weights_need_not(tmp_path: Path) -> None:
    model = trained(width=WIDTH)
    expected = snapshot(model)
    model.save_checkpoint(tmp_path, step=1, background=True)
    model.load_state_dict(trained(seed=4, width=WIDTH).state_dict())
    model.load_checkpoint(tmp_path)
    assert is_same(model, expected)
