"""A run that is killed goes on from memory of its host with the same bits, and a quick start ends as any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autovaruna.checkpoint.manifest import read_manifest
from autovaruna.elastic.job_folder import PINNED, VARIABLE, JobPlace, Reporter
from autovaruna.elastic.job_state import Checkpoints, find_state, hand_out
from autovaruna.elastic.link import Link
from autovaruna.elastic.notices import EventLog
from autovaruna.elastic.snapshot import Snapshots
from tests.elastic.keepers import keeper
from tests.hosts.elastic_run import train_alone
from tests.hosts.emulation import WAIT_SECONDS, wait_for

SCRIPT = Path(__file__).with_name("one_rank.py")
ROOT = SCRIPT.parents[2]
NUM_STEPS = 17

pytestmark = pytest.mark.timeout(120)


def train(place: JobPlace, *words: int) -> list[str]:
    """Returns what the script prints in a job's place."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: json.dumps(asdict(place))}
    call = [sys.executable, SCRIPT, *map(str, words)]
    done = subprocess.run(call, env=variables, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == (9 if len(words) > 1 else 0), done.stderr
    return done.stdout.splitlines()


@cache
def undisturbed() -> list[str]:
    return train_alone(SCRIPT, NUM_STEPS).splitlines()


def test_a_run_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Dropout, a scheduler, a scaler, batch statistics, a sampler, draws of the script, and its own numbers."""
    folder = tmp_path / "job"
    expected = undisturbed()
    with keeper(folder) as link:
        link.ask("begin", number=1, num_ranks=1, buddy=None).result(WAIT_SECONDS)
        place, found = JobPlace(str(folder), 1), ["begin 0"]
        for attempt, last in enumerate((6, 11, 0), 2):
            lines = train(place, NUM_STEPS, *([last] if last else []))
            first = 0 if place.step is None else place.step
            assert lines[0] == f"begin {first}"
            found[first + 1 :] = lines[1:]
            ranks = link.ask("ping").result(WAIT_SECONDS)["ranks"]
            assert ranks["0"]["state"] in ("", "Z") and ranks["0"]["steps"] >= first
            if last:
                state = find_state([link])
                assert state is not None and state.hosts == ["localhost"] and state.step > 0
                assert not hand_out(state, ["localhost"], {"localhost": link}) and first <= state.step < last
                link.ask("begin", number=attempt, num_ranks=1, buddy=None).result(WAIT_SECONDS)
                place = JobPlace(str(folder), attempt, 1, state.step)
        told = ranks["0"]
        assert (told["calls"], told["steps"], told["is_inside"]) == (NUM_STEPS - first, NUM_STEPS - 1, False)
    assert found == expected


class SlowDisk(Link):
    """The link to a keeper whose disk takes so long that ranks come some snapshots further."""

    def ask(self, do: str, **arguments: Any) -> Future[Any]:
        if do == "save":
            before = self.newest()
            wait_for(lambda: self.newest() > before + 3, "snapshots while a checkpoint is written")
        return super().ask(do, **arguments)

    def newest(self) -> int:
        """Returns the newest step in memory."""
        return super().ask("ping").result(WAIT_SECONDS)["newest"] or 0


def test_snapshots_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Once, none was taken meanwhile, and a job whose rank died lost all steps since; its memory is free afterwards."""
    folder, checkpoints = tmp_path / "job", tmp_path / "checkpoints"
    with keeper(folder, kind=SlowDisk) as link:
        link.ask("begin", number=1, num_ranks=1, buddy=None).result(WAIT_SECONDS)
        variables = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: json.dumps(asdict(JobPlace(str(folder), 1)))}
        with subprocess.Popen([sys.executable, SCRIPT, "1000000"], env=variables, stdout=subprocess.DEVNULL) as rank:
            wait_for(lambda: link.newest() > 0, "a snapshot")
            Checkpoints(str(checkpoints), 1.0, EventLog(None)).save([link])
            newest = link.newest()
            rank.kill()
        (written,) = checkpoints.glob("step-*")
        state = find_state([link])
        assert state is not None and state.step >= newest > read_manifest(written).step
        assert not read_manifest(written).damages(written) and not (folder / PINNED).exists()
        files = [path for path in folder.rglob("slot-*/*") if path.is_file()]
        assert files and all(path.stat().st_nlink == 1 for path in files)


class HangingDisk(Link):
    """The link to a keeper whose disk takes for ever."""

    def ask(self, do: str, **arguments: Any) -> Future[Any]:
        return Future() if do == "save" else super().ask(do, **arguments)


def test_a_disk_that_hangs_is_waited_for_with_words_and_not_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "job"
    with keeper(folder, kind=HangingDisk) as link:
        link.ask("begin", number=1, num_ranks=1, buddy=None).result(WAIT_SECONDS)
        train(JobPlace(str(folder), 1), NUM_STEPS, 3)
        checkpoints = Checkpoints(str(tmp_path / "checkpoints"), 1.0, EventLog(None))
        assert "has not taken the checkpoint within 1 s" in checkpoints.finish([link], 1.0)
    said = capsys.readouterr().err
    assert f"waiting for {tmp_path / 'checkpoints'} to take a checkpoint" in said and "within 1 s" in said


def test_a_run_whose_host_has_no_room_trains_on_and_the_keeper_hears_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with keeper(folder) as link:
        link.ask("begin", number=1, num_ranks=1, buddy=None).result(WAIT_SECONDS)
        train(JobPlace(str(folder), 1), NUM_STEPS, 3)
        file, *_ = folder.rglob("slot-0/model-*")
        link.ask("begin", number=2, num_ranks=1, buddy=None).result(WAIT_SECONDS)
        full = JobPlace(str(folder), 2).of_rank(0) / "slot-0"
        full.mkdir(parents=True)
        (full / file.name).symlink_to("/dev/full")
        assert train(JobPlace(str(folder), 2), NUM_STEPS) == undisturbed()
        said = link.ask("ping").result(WAIT_SECONDS)
        assert said["is_full"] and said["newest"] is None


def test_no_snapshot_begins_without_room_beside_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = JobPlace(str(tmp_path), 1)
    snapshots = Snapshots(place, 0, Reporter(place.of_rank(0)))
    slot = place.of_rank(0) / "slot-0"
    slot.mkdir()
    (slot / "weights").write_bytes(b"12345678")
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=7, f_frsize=1))
    snapshots.begin_border(1)
    assert snapshots.is_ready, "it is overwritten"
    os.link(slot / "weights", tmp_path / "pinned")
    assert not snapshots.is_ready
    (tmp_path / "pinned").unlink()
    assert snapshots.is_ready


ENDS = """
import atexit, ctypes
from autovaruna.elastic.standby import QuickEnd
end = QuickEnd()
atexit.register(lambda: print("said at the end"))
class Slow:
    def __del__(self):
        print("taken apart")
kept = Slow()
print("said", end=" ")
ctypes.CDLL(None).printf(b"by a library ")
end.status = {status}
"""


@pytest.mark.parametrize(("status", "code", "is_quick"), [(3, 3, True), (None, 0, False)])
def test_what_is_due_at_the_end_of_a_forked_rank_is_done(status: int | None, code: int, is_quick: bool) -> None:
    """It ends as any other, but sooner."""
    call = [sys.executable, "-c", ENDS.format(status=status)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == code and not done.stderr
    assert done.stdout.startswith("said ") and "said at the end\n" in done.stdout and "by a library" in done.stdout
    assert ("taken apart" in done.stdout) != is_quick
