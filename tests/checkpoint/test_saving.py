"""A save is of one moment, also in the background; one that fails, or is killed, leaves earlier ones, and says so."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, CheckpointError, InputError, OrderError
from autovaruna.checkpoint import save
from autovaruna.checkpoint.folder import lock
from autovaruna.checkpoint.manifest import Bytes
from autovaruna.checkpoint.tensor_file import Rows
from autovaruna.ranks.world import World
from tests.catalogue import CASES
from tests.checkpoint.test_damage import is_same, snapshot, step, trained
from tests.hosts.emulation import wait_for
from tests.products import WHOLE
from tests.rank_threads import run_ranks
from tests.reference import adamw
from tests.session.training import Setup, on_ranks, pipeline

ROOT = Path(__file__).parents[2]
NUM_KILLS = 50 if WHOLE else 6


def save_forever(net: nn.Module, root: Path, told: Any) -> None:
    """Saves one checkpoint after another, whose weights are the number of the step."""
    torch.set_num_threads(1)
    model = AutoVaruna(net, torch.optim.Adam(net.parameters()))
    for number in range(1, 10**6):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(number)
        model.save_checkpoint(root, step=number, keep=2, background=number % 2 == 0, extra={"step": number})
        told.value = number


def test_killed_at_any_moment_the_newest_complete_one_loads(tmp_path: Path) -> None:
    draw = random.Random(0)
    context = multiprocessing.get_context("fork")
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model = AutoVaruna(net)
    for kill in range(NUM_KILLS):
        told = context.Value("l", 0)
        root = tmp_path / str(kill)
        process = context.Process(target=save_forever, args=(net, root, told))
        process.start()
        wait_for(lambda told=told: told.value >= 2, "its saves", 300)
        time.sleep(draw.random() * 0.1)
        process.kill()
        process.join()
        info = model.load_checkpoint(root)
        assert info.step is not None and info.step >= told.value - 1
        assert info.extra == {"step": info.step}
        assert all((parameter == info.step).all() for parameter in net.parameters())
        for each in root.glob("step-*"):
            model.load_checkpoint(each)


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Lets the n-th file fail, and all after it, as on a full disk."""
    real, count = save.write_file, [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    for file in ("save", "folder"):
        monkeypatch.setattr(f"autovaruna.checkpoint.{file}.write_file", failing)


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("after", range(5))
def test_on_a_full_disk_all_ranks_hear_of_it_and_the_older_one_stays(
    after: int, is_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["chain"]
    barrier = threading.Barrier(2)

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model(**case.batch(7, 0)[1]).backward()
        optimizer.step()
        model.save_checkpoint(tmp_path, step=1)
        expected = model.state_dict()
        barrier.wait()
        if rank == 0:
            full_disk(monkeypatch, after)
        barrier.wait()
        with pytest.raises(CheckpointError, match="No space left"):
            model.save_checkpoint(tmp_path, step=2, background=is_background)
            model.wait_checkpoint()
        barrier.wait()
        assert [each.name for each in tmp_path.glob("*step-*")] == ["step-00000001"]
        assert model.load_checkpoint(tmp_path).step == 1
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    on_ranks(pipeline(2), case, run, adamw)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written: "):
        trained().save_checkpoint(tmp_path / "file" / "x", step=1)


@pytest.mark.parametrize("is_background", [False, True])
def test_files_go_through_the_tempdir(is_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    real = save.shutil.copyfile
    monkeypatch.setattr(save.shutil, "copyfile", lambda *paths: copied.append(paths[0]) or real(*paths))
    (tmp_path / "local").mkdir()
    model = trained()
    model.save_checkpoint(tmp_path / "far", step=1, tempdir=str(tmp_path / "local"), background=is_background)
    model.wait_checkpoint()
    assert copied and all(path.is_relative_to(tmp_path / "local") for path in copied)
    assert not list((tmp_path / "local").iterdir())
    assert trained(seed=5).load_checkpoint(tmp_path / "far").step == 1


def test_what_killed_jobs_leave_in_the_temporary_folder_goes(tmp_path: Path) -> None:
    """Once, each kill left its part of a checkpoint on the local disk, until that was full."""
    local, others = tmp_path / "local", tmp_path / "local" / "autovaruna-checkpoint-b"
    for path in (local, local / "autovaruna-checkpoint-a", others, local / "of-others"):
        path.mkdir()
    (local / "autovaruna-checkpoint-a" / "part").write_text("left")
    with lock(others):
        trained().save_checkpoint(tmp_path / "far", step=1, tempdir=str(local))
    assert sorted(path.name for path in local.iterdir()) == [others.name, "of-others"]


def test_what_fails_in_background_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    full_disk(monkeypatch, 0)
    model.save_checkpoint(tmp_path, step=1, background=True)
    with pytest.raises(CheckpointError, match=r"in the background failed: .*No space left"):
        wait_for(lambda: model(torch.ones(2, 4)) is None, "its error", 60.0)
    model(torch.ones(2, 4))


@pytest.mark.parametrize("is_full", [False, True])
def test_the_end_of_the_program_waits_and_tells(is_full: bool, tmp_path: Path) -> None:
    script = (
        "import sys, torch; from autovaruna import AutoVaruna\n"
        "from autovaruna.checkpoint import save\n"
        "real = save.write_file\n"
        "def slow(*args):\n"
        "    import time; time.sleep(0.5)\n"
        f"    if {is_full}: raise OSError(28, 'No space left on device')\n"
        "    return real(*args)\n"
        "save.write_file = slow\n"
        "AutoVaruna(torch.nn.Linear(3, 3)).save_checkpoint(sys.argv[1], step=1, background=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert bool(done.returncode) == ("No space left on device" in done.stderr) == is_full, done.stderr
    assert [each.name for each in tmp_path.glob("*step-*")] == ["step-00000001"] * (not is_full)


def test_between_a_load_and_the_first_call_there_is_nothing_to_save(tmp_path: Path) -> None:
    case = CASES["chain"]
    trained_model = case.model()
    AutoVaruna(trained_model).save_checkpoint(tmp_path, step=1)

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model.load_checkpoint(tmp_path)
        assert all(map(torch.equal, model.state_dict().values(), trained_model.state_dict().values()))
        with pytest.raises(OrderError, match="Call the model first"):
            model.save_checkpoint(tmp_path, step=2)

    on_ranks(Setup(((0, 1),)), case.model(1), run, adamw, token=(case.name, False))


def test_a_model_without_numbers_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoVaruna(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="weight and 1 others are on meta"):
        model.save_checkpoint(tmp_path, step=0)
    assert not list(tmp_path.glob("*step-*"))


@pytest.mark.parametrize(
    "given",
    [{"step": -1}, {"step": True}, {"step": "5"}, {"step": 1.5}, {"step": float("nan")}, {"step": 1, "keep": 0}],
)
def test_what_is_no_number_is_named(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{list(given)[-1]} is .*expected a whole number"):
        trained().save_checkpoint(tmp_path, **given)
    assert not list(tmp_path.glob("*step-*"))


def test_ranks_that_save_or_load_other_steps_or_folders_are_told(tmp_path: Path) -> None:
    """One folder may go by several names."""
    (tmp_path / "link").symlink_to(tmp_path / "0")
    (tmp_path / "0").mkdir()

    def be_rank(world: World) -> None:
        model, rank = AutoVaruna(nn.Linear(4, 1)), world.rank
        own, same = tmp_path / str(rank), tmp_path / ("link" if rank else "0")
        for words, folder, given in (
            (r"step is 1 on rank 0, 2 on rank 1", same, {"step": 1 + rank}),
            (r"background is False on rank 0, True on rank 1", same, {"step": 1, "background": bool(rank)}),
            (r"keep is None on rank 0, 1 on rank 1", same, {"step": 1, "keep": rank or None}),
            (r"dir is \S+/0 on rank 0, \S+/1 on rank 1", own, {"step": 1}),
        ):
            with pytest.raises(CheckpointError, match=words):
                model.save_checkpoint(folder, **given)
        model.save_checkpoint(same, step=1, keep=1)
        with pytest.raises(CheckpointError, match=r"step is 'latest' on rank 0, 1 on rank 1"):
            model.load_checkpoint(same, step=1 if rank else "latest")
        with pytest.raises(CheckpointError, match=r"dir is \S+/0 on rank 0, \S+/1 on rank 1"):
            model.load_checkpoint(own)
        assert model.load_checkpoint(same).step == 1

    run_ranks(2, be_rank)


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
