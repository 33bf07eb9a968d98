"""A keeper gives and takes what is the job's, to the job's own alone, and leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from autovaruna.checkpoint.remote_file import Pointer, open_bytes
from autovaruna.checkpoint.save import write_file
from autovaruna.elastic import link as link_module
from autovaruna.elastic.host_processes import processes_with, state_of
from autovaruna.elastic.job_folder import ALONE, FULL, RankPart, Reporter, write_record
from autovaruna.elastic.job_state import HeldPart, State, find_state, hand_out
from autovaruna.elastic.keeper import Keeper
from autovaruna.elastic.link import Link
from autovaruna.elastic.standby import LOCK
from autovaruna.elastic.watch import JobWatch
from autovaruna.errors import CheckpointError
from autovaruna.ranks.tls import Authority, connect
from tests.elastic.keepers import AUTHORITY, keeper, settings_of
from tests.hosts.emulation import WAIT_SECONDS, wait_for

pytestmark = pytest.mark.timeout(120)
REFUSED = (EOFError, ConnectionError)
SECRET = "what is no business of anybody's"


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    """Returns the link to a keeper of ``tmp_path / "job"``."""
    (tmp_path / "secret").write_text(SECRET)
    with keeper(tmp_path / "job") as found:
        yield found


def read(link: Link, place: str, authority: Authority = AUTHORITY, host: str = "localhost") -> bytearray:
    """Returns what a keeper answers to whoever wants to read a file of a host."""
    with connect("127.0.0.1", link.port, authority.credentials("h2"), host) as connection:
        connection.send_bytes(json.dumps({"read": place, "offset": 0, "count": 100}).encode())
        return connection.recv_bytes()


def part_in(slot: Path, rank: int = 1, step: int = 3, text: bytes = b"weights", num_ranks: int = 2) -> RankPart:
    """Writes a part and returns what it is."""
    slot.mkdir(parents=True)
    record = write_file(slot / "weights", [np.frombuffer(text, np.uint8)], is_new=True)
    part = RankPart({"weights": record}, {}, 0, {}, step, rank, num_ranks, {})
    write_record(slot, part)
    return part


def test_files_of_the_job_are_read_and_no_others(link: Link, tmp_path: Path) -> None:
    (tmp_path / "job" / "mine").write_text("words")
    (tmp_path / "job" / "leads_out").symlink_to(tmp_path / "secret")
    assert read(link, "mine") == b"words"
    for place in (
        "../secret",
        str(tmp_path / "secret"),
        "leads_out",
        "credentials.json",
        "./credentials.json",
        "",
        ".",
        "none",
        "a\0b",
    ):
        with pytest.raises(REFUSED):
            read(link, place)
    for other in ({"authority": Authority()}, {"host": "h3"}):
        with pytest.raises(OSError, match="127"):
            read(link, "mine", **other)
    with connect("127.0.0.1", link.port, AUTHORITY.credentials("h2"), "localhost") as connection:
        connection.send_bytes(b"[" * 100_000)
        with pytest.raises(REFUSED):
            connection.recv_bytes()
    assert read(link, "mine") == b"words"
    assert oct((tmp_path / "job").stat().st_mode)[-3:] == "700"
    assert oct((tmp_path / "job" / "credentials.json").stat().st_mode)[-3:] == "600"


def test_a_file_elsewhere_is_read_as_one_of_this_host(link: Link, tmp_path: Path) -> None:
    content = os.urandom((8 << 20) + 5)
    (tmp_path / "job" / "big").write_bytes(content)
    place = tmp_path / "other" / "restore" / "big"
    place.parent.mkdir(parents=True)
    credentials = tmp_path / "other" / "credentials.json"
    credentials.write_text(json.dumps(asdict(AUTHORITY.credentials("h2"))))
    Pointer("127.0.0.1", link.port, "localhost", "big").write(place)
    found = bytearray(len(content))
    for is_by_a_third in (False, True):
        if is_by_a_third:  # the keeper has no more than a pointer to the file
            (tmp_path / "job" / "restore").mkdir()
            Pointer("127.0.0.1", link.port, "localhost", "big").write(tmp_path / "job" / "restore" / "big")
            Pointer("127.0.0.1", link.port, "localhost", "restore/big").write(place)
        with open_bytes(place) as file:
            count = 0
            while more := file(memoryview(found)[count:], count):
                count += more
        assert found == content
        found = bytearray(len(content))
    Pointer("127.0.0.1", link.port, "localhost", "../secret").write(place)
    with open_bytes(place) as file, pytest.raises(CheckpointError, match=r"\.\./secret cannot be read from memory"):
        file(memoryview(found), 0)
    credentials.write_text(json.dumps(asdict(Authority().credentials("h2"))))
    with pytest.raises(CheckpointError, match="big lies in memory of another host, which cannot be reached"):
        open_bytes(place).__enter__()


def send(link: Link, part: dict[str, Any], pieces: list[bytes], attempt: int = 4) -> bytearray:
    """Returns what a keeper answers to whoever sends a copy of a part."""
    with connect("127.0.0.1", link.port, AUTHORITY.credentials("h2"), "localhost") as connection:
        connection.send_bytes(json.dumps({"part": part, "attempt": attempt}).encode())
        for piece in pieces:
            connection.send_bytes(piece)
            assert connection.recv_bytes() == b""
        return connection.recv_bytes()


def test_copies_are_taken_if_they_are_whole(link: Link, tmp_path: Path) -> None:
    part = part_in(tmp_path / "slot")
    link.ask("begin", number=4, num_ranks=2, buddy=None).result(WAIT_SECONDS)
    assert send(link, asdict(part), [b"wei", b"ghts"]) == b"taken"
    ((found),) = link.ask("inventory").result(WAIT_SECONDS)
    assert found["attempt"] == 4 and found["place"].startswith("attempt-00004/copy-00001/slot-")
    assert found["part"]["step"] == 3
    for pieces in ([b"weighty"], [b"weights too long"]):
        with pytest.raises(REFUSED):
            send(link, asdict(replace(part, step=5)), pieces)
    for attempt, changed in ((3, part), (5, part), (4, replace(part, num_ranks=1, rank=0)), (4, replace(part, rank=2))):
        with pytest.raises(REFUSED):
            send(link, asdict(replace(changed, step=10**9)), [b"weights"], attempt)
    for name in ("../weights", "/weights", "a/b", ".."):
        with pytest.raises(REFUSED):
            send(link, {**asdict(part), "files": {name: asdict(part.files["weights"])}}, [b"weights"])
    assert [each["part"]["step"] for each in link.ask("inventory").result(WAIT_SECONDS)] == [3]
    assert not (tmp_path / "job" / "attempt-00004" / "copy-00001" / "weights").exists()


def test_a_state_is_believed_that_the_ranks_of_its_run_can_have_made(link: Link, tmp_path: Path) -> None:
    """Once, a part of step 10^9, of rank 0 of 1, was the newest state, and was written over a checkpoint."""
    attempt = tmp_path / "job" / "attempt-00001"
    link.ask("begin", number=1, num_ranks=1, buddy=None).result(WAIT_SECONDS)
    Reporter(attempt / "rank-00000").begin_call(7, False, 0.0)
    for number, (step, num_ranks) in enumerate([(6, 1), (7, 1), (10**9, 1), (8, 2)]):
        part_in(attempt / f"copy-0000{number}" / "slot-0", rank=0, step=step, num_ranks=num_ranks)
    assert [find_state([link], aside=aside).key for aside in ((), {(7, 1)})] == [(7, 1), (6, 1)]


def test_a_state_is_put_together_from_here_and_elsewhere(link: Link, tmp_path: Path) -> None:
    link.ask("begin", number=1, num_ranks=2, buddy=None).result(WAIT_SECONDS)
    part_in(tmp_path / "job" / "attempt-00001" / "rank-00001" / "slot-0")
    pointer = asdict(Pointer("h2", 5, "h2", "there"))
    own = {"weights": "attempt-00001/rank-00001/slot-0/weights"}
    link.ask("restore", texts={"state.json": "{}"}, own=own, others={"others": pointer}).result(WAIT_SECONDS)
    place = tmp_path / "job" / "restore"
    assert sorted(each.name for each in place.iterdir()) == ["others.elsewhere", "state.json", "weights"]
    assert (place / "weights").read_bytes() == b"weights"
    assert json.loads((place / "others.elsewhere").read_text()) == pointer
    with pytest.raises(OSError, match="not in the job's folder"):
        link.ask("restore", texts={}, own={"x": "../secret"}, others={}).result(WAIT_SECONDS)
    link.ask("drop", before=2, step=2).result(WAIT_SECONDS)
    assert (tmp_path / "job" / "attempt-00001").exists(), "it has a newer step"
    link.ask("drop", before=2, step=3).result(WAIT_SECONDS)
    assert not place.exists() and not (tmp_path / "job" / "attempt-00001").exists()


class FakeLink:
    """A keeper that takes whatever state it is given."""

    address, port = "", 0

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def ask(self, do: str, **arguments: Any) -> Future[None]:
        self.asked, answer = arguments, Future[None]()
        answer.set_result(None)
        return answer


def test_what_lies_on_a_host_that_another_does_not_reach_is_read_by_a_third_one(tmp_path: Path) -> None:
    """Once, three starts failed, and the job was given up."""
    part = replace(part_in(tmp_path / "slot", num_ranks=1, rank=0), documents={"weights": {}})
    links = {host: FakeLink() for host in "abc"}
    state = State(3, 1, {0: [HeldPart("c", "slot", part)]}, 0.0)
    for unreached, hosts, source, failed in (
        ([], "ab", ["c", "slot/weights"], ""),
        ([("b", "c")], "ab", ["a", "restore/weights"], ""),
        ([("b", "c"), ("b", "a")], "ab", [], "b"),
        ([("b", "c"), ("a", "c")], "ab", [], "ab"),
    ):
        found = hand_out(state, hosts, cast(Any, links), unreached)
        assert "".join(found) == failed and all("does not reach c, which alone has" in why for why in found.values())
        if source:
            pointer = links["b"].asked["others"]["weights"]
            assert [pointer["name"], pointer["path"]] == source


def test_a_host_without_room_for_copies_says_so_until_the_next_run(link: Link, tmp_path: Path) -> None:
    """Once, nobody heard of it, and there were no more snapshots; later, where it had no inodes either."""
    for number in range(2):
        slot = tmp_path / "job" / "attempt-00004" / "copy-00001" / f"slot-{number}"
        slot.mkdir(parents=True)
        (slot / "weights").symlink_to("/dev/full")
    link.ask("begin", number=4, num_ranks=2, buddy=None).result(WAIT_SECONDS)
    assert not link.ask("ping").result(WAIT_SECONDS)["is_full"]
    (tmp_path / "job" / FULL).symlink_to("/nowhere/full")  # so that no file can be made there
    with pytest.raises(REFUSED):
        send(link, asdict(part_in(tmp_path / "slot")), [b"weights"])
    wait_for(lambda: link.ask("ping").result(WAIT_SECONDS)["is_full"], "a full host")
    link.ask("begin", number=5, num_ranks=1, buddy=None).result(WAIT_SECONDS)
    assert not link.ask("ping").result(WAIT_SECONDS)["is_full"]


def test_copies_that_do_not_arrive_are_told_with_their_reason_and_ranks_go_on_without(
    link: Link, tmp_path: Path
) -> None:
    """Once, where hosts had no names, the first snapshot was the last, and no checkpoint was written."""
    link.ask("begin", number=1, num_ranks=1, buddy=["nowhere.invalid", 1, "h2"]).result(WAIT_SECONDS)
    reporter = Reporter(tmp_path / "job" / "attempt-00001" / "rank-00000")
    reporter.record_snapshot(0, 3)
    wait_for(lambda: link.ask("ping").result(WAIT_SECONDS)["copy_fault"], "a fault")
    to, why = link.ask("ping").result(WAIT_SECONDS)["copy_fault"]
    assert to == "h2" and "nowhere.invalid" in why
    watch = JobWatch(1)
    watch.record("h1", link.ask("ping").result(WAIT_SECONDS))
    assert watch.held_step(["h1", "h2"]) == -1
    wait_for(lambda: (tmp_path / "job" / "attempt-00001" / ALONE).exists(), "ranks that do not wait")
    watch.record("h1", link.ask("ping").result(WAIT_SECONDS))
    assert watch.held_step(["h1"]) == 3


def test_hosts_are_found_that_do_not_reach_each_other(link: Link) -> None:
    others = [["localhost", "127.0.0.1", link.port], ["h2", "127.0.0.1", link.port], ["h3", "nowhere.invalid", 1]]
    found = link.ask("reach", others=others).result(WAIT_SECONDS)
    assert found.keys() == {"h2", "h3"}, "another host, and none"


@pytest.mark.parametrize(("num_blocks", "num_inodes", "is_full"), [(0, 5, True), (5, 0, True), (5, 5, False)])
def test_a_host_whose_temporary_folder_is_full_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_inodes: int, is_full: bool
) -> None:
    own = Keeper(tmp_path, AUTHORITY.credentials("localhost"), None, 0.1)
    room = SimpleNamespace(f_bavail=num_blocks, f_files=9, f_favail=num_inodes)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert own.full_folder() == (str(tmp_path) if is_full else "")


def test_what_ssh_asks_is_told_and_it_is_cut_off_with_all_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = ["sh", "-c", "sleep 4567 & printf 'hello\nPassword: ' >&2; wait"]
    monkeypatch.setattr(link_module, "_command", lambda host: asks)
    link = Link("h2", {})
    wait_for(lambda: link.words == "Password:", "the question")
    link.cut()
    wait_for(lambda: link.is_gone and not processes_with(b"sleep\x004567"), "the end")


def test_a_state_is_as_old_as_it_is_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    own = Keeper(tmp_path / "job", AUTHORITY.credentials("localhost"), None, 0.1)
    own.begin(1, 2, None)
    part_in(tmp_path / "job" / "attempt-00001" / "rank-00001" / "slot-0")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600.0)
    assert 0.0 <= own.inventory()[0]["age"] < 60.0


@pytest.mark.parametrize(("name", "old", "new"), [("weights", b"hts", b"hed"), ("part.json", b'"step":7', b'"step":5')])
def test_a_damaged_part_is_none(link: Link, tmp_path: Path, name: str, old: bytes, new: bytes) -> None:
    """Once, what its record says was believed, whatever had become of that."""
    slots = [tmp_path / "job" / "attempt-00001" / "rank-00001" / f"slot-{number}" for number in range(2)]
    link.ask("begin", number=1, num_ranks=2, buddy=None).result(WAIT_SECONDS)
    part_in(slots[0], step=6)
    part_in(slots[1], step=7)
    path = slots[1] / name
    path.write_bytes(path.read_bytes().replace(old, new))
    assert [each["part"]["step"] for each in link.ask("inventory").result(WAIT_SECONDS)] == [6]


def keeper_of(job: Path) -> int:
    """Returns the process that has the lock of a job's folder."""
    return int((job / LOCK).read_text().split()[0])


def test_a_folder_has_one_keeper_and_another_if_nobody_speaks_to_that(link: Link, tmp_path: Path) -> None:
    """Once, where the clock of a host had jumped back, that was so an hour later."""
    link.ask("begin", number=1, num_ranks=2, buddy=None).result(WAIT_SECONDS)
    part_in(tmp_path / "job" / "attempt-00001" / "rank-00001" / "slot-0")
    second = Link("localhost", settings_of(tmp_path / "job"))
    second.wait(WAIT_SECONDS)
    wait_for(lambda: bool(second.words), "its last words")
    assert "another one holds" in second.words and link.is_up
    assert link.ask("ping").result(WAIT_SECONDS)["ranks"] == {}
    os.kill(keeper_of(tmp_path / "job"), signal.SIGSTOP)
    os.utime(tmp_path / "job" / LOCK, (time.time() + 3600.0,) * 2)
    wait_for(lambda: link.is_silent, "a silent keeper")
    with keeper(tmp_path / "job") as third:
        assert [each["part"]["step"] for each in third.ask("inventory").result(WAIT_SECONDS)] == [3] and link.is_gone


def test_a_host_on_which_the_script_cannot_run_says_why(tmp_path: Path) -> None:
    """Once, one that was added and had no torch was passed over in silence."""
    wanted = {"versions": {"torch": "0.1"}, "files": [str(tmp_path), "/nowhere/train.py"]}
    link = Link("localhost", settings_of(tmp_path / "job") | wanted)
    wait_for(lambda: link.is_up, "a keeper")
    assert link.fault.endswith(", 0.1 expected; there is no /nowhere/train.py"), link.fault
    link.quit()
    link.wait(WAIT_SECONDS)


def test_a_standby_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """And one that is stopped goes on, whichever keeper has started it; once, ranks waited for it."""
    job = tmp_path / "job"
    with keeper(job, has_standby=True) as first:
        wait_for(lambda: first.is_ready, "a standby process")
        (standby,) = processes_with(str(job / "standby").encode())
        os.kill(standby, signal.SIGSTOP)
        wait_for(lambda: state_of(standby) == "S", "the same one, which goes on")
        os.kill(keeper_of(job), signal.SIGKILL)
        with keeper(job, has_standby=True) as link:
            os.kill(standby, signal.SIGSTOP)
            wait_for(lambda: state_of(standby) == "S", "the same one, which goes on")
            os.kill(standby, signal.SIGKILL)
            wait_for(lambda: not link.is_ready, "a report")
            wait_for(lambda: link.is_ready, "another standby process")
    assert not processes_with(str(job / "standby").encode())


@contextmanager
def killed_manager(folder: Path, keep_seconds: float) -> Iterator[float]:
    """Starts a manager with a keeper, and kills it; returns when, on the monotonic clock."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.elastic.keepers import keeper\n"
        "with keeper(Path(sys.argv[1]), keep_seconds=float(sys.argv[2])):\n    print('up', flush=True); time.sleep(60)"
    )
    call = [sys.executable, "-c", script, str(folder), str(keep_seconds)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as manager:
        assert manager.stdout is not None and manager.stdout.readline() == "up\n"
        killed = time.monotonic()
        manager.kill()
        yield killed


def test_a_keeper_whose_manager_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with killed_manager(tmp_path / "job", 1.0) as killed:
        wait_for(lambda: not (tmp_path / "job").exists(), "the end of the keeper")
        assert 1.0 < time.monotonic() - killed < 30.0


def test_what_a_host_holds_goes_to_the_keeper_that_comes_in_time(tmp_path: Path) -> None:
    """Once, a host forgot it at once when the connection to its manager ended."""
    folder = tmp_path / "job"
    slot = folder / "attempt-00001" / "rank-00001" / "slot-0"
    place = f'{json.dumps(str(folder))}, "attempt": '
    with killed_manager(folder, 60.0):
        ranks = [
            subprocess.Popen([sys.executable, "-c", "input()"], env={"PLACE": f"{place}{attempt},"}, stdin=PIPE)
            for attempt in (1, 2)
        ]
        part_in(slot)
        (folder / "attempt-00001" / "ranks").write_text("2")
        with keeper(folder) as link:
            assert link.held == (3, 1), "for which others are waited that may have its other parts"
            assert [each["part"]["step"] for each in link.ask("inventory").result(WAIT_SECONDS)] == [3]
            link.ask("begin", number=2, num_ranks=1, buddy=None).result(WAIT_SECONDS)
            assert ranks[0].wait(WAIT_SECONDS) == -signal.SIGKILL, "what is left of a run before is ended"
            assert ranks[1].poll() is None, "the run goes on of which a keeper alone was lost"
        assert not folder.exists()
    ranks[1].communicate()


def test_what_jobs_left_that_were_killed_with_all_their_processes_is_removed(tmp_path: Path) -> None:
    left, held, used, young = (tmp_path / f"autovaruna-0-{name}" for name in ("left", "held", "used", "young"))
    for folder in (left, held, used, young):
        folder.mkdir()
        (folder / LOCK).touch()
        if folder != young:
            os.utime(folder / LOCK, (0, 0))
    rank = subprocess.Popen([sys.executable, "-c", "input()"], env={"FOLDER": str(used)}, stdin=subprocess.PIPE)
    with open(held / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with keeper(tmp_path / "autovaruna-0-own"):
            assert sorted(path.name[13:] for path in tmp_path.iterdir()) == ["held", "own", "used", "young"]
    rank.communicate()
