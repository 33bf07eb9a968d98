"""Holds that what is written in the background is of one moment, whatever the training does meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from autovaruna import AutoVaruna, CheckpointError
from autovaruna.checkpoint import gaps, layout
from autovaruna.checkpoint.checksum import CHUNK_BYTES
from autovaruna.checkpoint.direct import DirectFile, chunk_memory
from autovaruna.checkpoint.pace import Pace
from autovaruna.checkpoint.snapshot import Snapshot
from autovaruna.checkpoint.stream import write_snapshot
from autovaruna.checkpoint.write import write
from tests.checkpoint.test_damage import is_same, trained
from tests.checkpoint.test_damage import snapshot as weights_of
from tests.checkpoint.test_damage import step as train

WIDTH = 1 << 19  # 12 MiB of weights, in several chunks


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets each chunk take its time."""
    real = layout.Layout.fill
    monkeypatch.setattr(layout.Layout, "fill", lambda *args: (time.sleep(seconds), real(*args))[1])


@pytest.mark.parametrize("seconds", [None, 0.0, 0.03])
def test_whenever_the_step_comes_it_does_not_reach_into_the_files(
    seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 0.004)
    draw = random.Random(0)
    spare: list[Any] = []
    for trial in range(6):
        tensors = {f"t{place}": torch.full((1_500_000 + place,), 1.0) for place in range(5)}
        every = tensors | {"small": torch.ones(3), "buffer": torch.ones(100_000)}
        shot = Snapshot({"x": every}, {("x", name) for name in every if name != "buffer"}, {}, seconds, spare)
        (tmp_path / str(trial)).mkdir()
        thread = threading.Thread(target=write_snapshot, args=(shot, tmp_path / str(trial), None, Pace(0)))
        every["buffer"].zero_()
        every["small"].zero_()
        thread.start()
        time.sleep(draw.random() * 0.05)
        shot.wait()
        for tensor in tensors.values():
            tensor.zero_()
        thread.join()
        found = (tmp_path / str(trial) / "x").read_bytes()
        words = np.frombuffer(
            found, np.float32, sum(tensor.numel() for tensor in every.values()), offset=len(found) % 4
        )
        assert (np.frombuffer(found[-4 * len(words) :], np.float32) == 1).all()


def test_steps_of_the_optimizer_go_on_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.02)
    model = trained(width=WIDTH)
    expected = weights_of(model)
    model.save_checkpoint(tmp_path, step=1, background=True)
    for _ in range(3):
        train(model)
    model.wait_checkpoint()
    other = trained(seed=1, width=WIDTH)
    other.load_checkpoint(tmp_path)
    assert is_same(other, expected)


def test_short_steps_let_the_thread_copy_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save knows no gap between steps: there was one step; memory for what was copied is used again."""
    real, asked = Snapshot.__init__, []

    def noted(*args: Any) -> None:
        asked.append(args[4])
        real(*args)

    monkeypatch.setattr(Snapshot, "__init__", noted)
    model = trained(width=WIDTH)
    for step in range(3):
        model.save_checkpoint(tmp_path, step=step, background=True)
        expected = weights_of(model)
        train(model)
        train(model)
        model.wait_checkpoint()
        other = trained(seed=1, width=WIDTH)
        other.load_checkpoint(tmp_path, step=step)
        assert is_same(other, expected)
    assert asked[0] is None and all(0 < seconds < 5 for seconds in asked[1:])


def test_the_time_to_the_next_step_is_without_what_steps_themselves_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread that copies would count on time that it has not, and the step would copy the rest."""
    clock = [0.0]
    monkeypatch.setattr(gaps, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(torch.optim.SGD):
        def step(self, *args: Any) -> Any:
            clock[0] += 100
            return super().step(*args)

    net = torch.nn.Linear(4, 1)
    torch.optim.SGD(net.parameters())  # from the first one on, hooks run around a parent's step as well
    model = AutoVaruna(net, Slow(net.parameters(), lr=0.1))
    known = model._persistence._gaps
    assert known.seconds_left() is None
    for gap in (7, 1, 3):  # one that was longer for once says nothing
        train(model)
        clock[0] += gap
    train(model)
    assert known.seconds_left() == pytest.approx(0.9)
    clock[0] += 0.25
    assert known.seconds_left() == pytest.approx(0.65)
    clock[0] += 60
    assert known.seconds_left() == pytest.approx(0.9)


def priority() -> str:
    return "idle" if os.sched_getscheduler(0) == os.SCHED_IDLE else "usual"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no such priority")
def test_who_waits_for_a_checkpoint_does_not_wait_for_idle_cores() -> None:
    pace, found = Pace(0), []

    def steps() -> Iterator[None]:
        for step in range(4):
            found.append(priority())
            if step == 1:
                pace.hurry()
            yield

    pace.run(steps())
    pace.run(steps())
    assert found == ["idle", "idle"] + ["usual"] * 6 and priority() == "usual"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no such priority")
def test_what_takes_too_long_is_written_with_the_usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autovaruna.checkpoint.pace._LEAST_SECONDS", 0.0)
    found: list[str] = []
    Pace(0).run(found.append(priority()) or time.sleep(0.01) for _ in range(20))  # type: ignore[func-returns-value]
    assert found[-1] == "usual" and len(found) == 20


def test_a_step_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes stands still in the middle of a chunk."""
    goes_on, real = threading.Event(), layout.Layout.fill

    def stand_still(self: Any, chunk: int, memory: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            goes_on.wait(60)
        return real(self, chunk, memory)

    tensor = torch.full((5_000_000,), 1.0)
    shot = Snapshot({"x": {"t": tensor}}, {("x", "t")}, {})
    monkeypatch.setattr(layout.Layout, "fill", stand_still)
    taken: list[Any] = []
    scratch = chunk_memory()
    thread = threading.Thread(target=lambda: taken.extend(shot.take("x", chunk, scratch).copy() for chunk in range(3)))
    thread.start()
    while len(shot._pending) == 3:
        time.sleep(0.001)
    shot.wait()
    tensor.zero_()
    goes_on.set()
    thread.join()
    assert (taken[0][4096:].view(np.float32) == 1).all()


def test_copies_are_ready_before_the_step_whatever_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still at the first chunk."""
    goes_on, real = threading.Event(), DirectFile.write
    monkeypatch.setattr(DirectFile, "write", lambda *args: (goes_on.wait(60), real(*args))[1])
    tensor = torch.full((15_000_000,), 1.0)
    shot = Snapshot({"x": {"t": tensor}}, {("x", "t")}, {}, seconds=0.1)
    thread = threading.Thread(target=write_snapshot, args=(shot, tmp_path, None, Pace(0)))
    thread.start()
    end = time.monotonic() + 30
    while shot._pending and time.monotonic() < end:
        time.sleep(0.001)
    assert not shot._pending
    shot.wait()
    tensor.zero_()
    goes_on.set()
    thread.join()
    assert (np.frombuffer((tmp_path / "x").read_bytes()[-4 * len(tensor) :], np.float32) == 1).all()


def test_a_thread_that_cannot_start_fails_the_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model = trained()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        model.save_checkpoint(tmp_path, step=1, background=True)
    with pytest.raises(CheckpointError, match="can't start new thread"):
        model.wait_checkpoint()
    assert not list(tmp_path.glob("*step*"))
    model.save_checkpoint(tmp_path, step=2, background=True)
    model.wait_checkpoint()
    assert [each.name for each in tmp_path.glob("step-*")]


def in_place(model: AutoVaruna) -> None:
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)


def past_autograd(model: AutoVaruna) -> None:
    next(iter(model.parameters())).data.mul_(0.5)


def of_the_optimizer(model: AutoVaruna) -> None:
    assert model._wrapped.optimizer is not None
    next(iter(model._wrapped.optimizer.optimizer.state.values()))["exp_avg"].numpy()[:] = 7


@pytest.mark.parametrize("change", [in_place, past_autograd, of_the_optimizer])
def test_another_change_meanwhile_is_told(
    change: Callable[[AutoVaruna], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(width=WIDTH)
    model.save_checkpoint(tmp_path, step=1)
    slow_down(monkeypatch, 0.02)
    model.save_checkpoint(tmp_path, step=2, background=True)
    change(model)
    train(model)
    with pytest.raises(CheckpointError, match=r"0\.weight.* changed while it was written"):
        model.wait_checkpoint()
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_weights_of_another_optimizer_may_change_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied at once: its steps say nothing to the checkpoint."""
    net = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 1))
    model = AutoVaruna(net, torch.optim.Adam(net[0].parameters()))
    other = torch.optim.SGD(net[1].parameters(), lr=0.1)
    train(model)
    expected = weights_of(model)
    slow_down(monkeypatch, 0.01)
    model.save_checkpoint(tmp_path, step=1, background=True)
    other.step()
    train(model)
    model.wait_checkpoint()
    model.load_checkpoint(tmp_path)
    assert is_same(model, expected)


def test_a_load_of_other_weights_meanwhile_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.01)
    model = trained(width=WIDTH)
    expected = weights_of(model)
    model.save_checkpoint(tmp_path, step=1, background=True)
    model.load_state_dict(trained(seed=4, width=WIDTH).state_dict())
    model.load_checkpoint(tmp_path)
    assert is_same(model, expected)


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_where_files_cannot_be_written_past_the_cache_they_go_through_it(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(os, refuses), []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "no direct access here")
        return real(*args)

    monkeypatch.setattr(os, refuses, refuse)
    memory = chunk_memory()
    memory[:] = 5
    file = DirectFile(tmp_path / "x")
    file.write(memory, CHUNK_BYTES, 0)
    file.write(memory, 1001, CHUNK_BYTES)
    file.finish(True)
    file.close()
    assert len(calls) > 1 and (tmp_path / "x").read_bytes() == b"\5" * (CHUNK_BYTES + 1001)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no other way than the cache")
def test_threads_that_write_a_file_go_through_the_cache_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.pwrite, []

    def refuse(descriptor: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            time.sleep(0.02)
            raise OSError(errno.EINVAL, "no direct access here")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    tensors = {f"t{place}": torch.randn(1_500_001) for place in range(5)}
    write(tmp_path / "x", layout.lay_out(tensors, {}))
    found = safetensors.torch.load_file(tmp_path / "x")
    assert refused and all(torch.equal(found[name], value) for name, value in tensors.items())
