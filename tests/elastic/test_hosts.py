"""Which hosts a job may use, as machine lists and notices come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from autovaruna.elastic import host_list, slow_ranks
from autovaruna.elastic import hosts as module
from autovaruna.elastic.hosts import BEAT_SECONDS, Hosts
from autovaruna.elastic.notices import EventLog
from autovaruna.elastic.options import MorphingOptions
from autovaruna.elastic.slow_ranks import Slow
from tests.elastic.keepers import AUTHORITY
from tests.hosts.emulation import wait_for
from tests.mpi.launch import find_mpirun

HOST, OTHER = "localhost", "elsewhere.invalid"


@contextmanager
def job_hosts(folder: Path, options: MorphingOptions) -> Iterator[Hosts]:
    """Returns the hosts of a job on this machine; its keeper ends with the context."""
    settings = {"folder": str(folder / "job"), "standby": False, "keep_seconds": 0.0, "copy_share": 1.0}
    hosts = Hosts({HOST: 1}, options, settings, AUTHORITY, folder / "own", EventLog(None))
    try:
        hosts.start(lambda: None)
        assert set(hosts.usable()) == {HOST}
        yield hosts
    finally:
        hosts.close()


def come_to(hosts: Hosts, usable: set[str], listed: set[str]) -> None:
    """Looks at the list until it has been read with these hosts, some of which can be used."""

    def is_so() -> bool:
        hosts.poll_hosts()
        return (set(hosts.usable()), set(hosts.listed)) == (usable, listed)

    wait_for(is_so, f"{usable} of {listed}")


def look(hosts: Hosts) -> set[str]:
    """Returns what can be used once the list has been looked at again."""
    time.sleep(BEAT_SECONDS)
    hosts.poll_hosts()
    time.sleep(0.5)
    hosts.poll_hosts()
    return set(hosts.usable())


def test_a_notice_holds_until_a_machine_list_is_written_after_it(tmp_path: Path) -> None:
    machines = tmp_path / "machines"
    machines.write_text(f"{HOST}\n")
    with job_hosts(tmp_path, MorphingOptions(str(machines), 1)) as hosts:
        machines.write_text(f"{HOST}\n{OTHER}\n")
        assert not hosts.notice(HOST, 60.0), "the list was written before, and is read after it"
        come_to(hosts, set(), {HOST, OTHER})
        assert not look(hosts)
        machines.write_text(f"{HOST}\n")
        come_to(hosts, {HOST}, {HOST})


def test_a_host_that_a_command_lists_until_it_has_gone_stays_left(tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.write_text(f"{HOST}\n")
    with job_hosts(tmp_path, MorphingOptions(None, 1, discover_hosts=f"cat {found}")) as hosts:
        assert not hosts.notice(HOST, 60.0)
        found.write_text(f"{HOST}\n{OTHER}\n")
        come_to(hosts, set(), {HOST, OTHER})
        found.write_text(f"{OTHER}\n")
        come_to(hosts, set(), {OTHER})
        found.write_text(f"{HOST}\n")
        come_to(hosts, {HOST}, {HOST})


def test_a_command_that_hangs_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, what its shell had started was waited for, and the list was never read again."""
    monkeypatch.setattr(host_list, "_SECONDS", 3.0)
    hangs = f"test -e {tmp_path}/hung && echo {OTHER} || {{ touch {tmp_path}/hung; sleep 60; }}; true"
    with job_hosts(tmp_path, MorphingOptions(None, 1, discover_hosts=hangs)) as hosts:
        assert look(hosts) == {HOST}
        come_to(hosts, set(), {OTHER})
    assert "takes longer than 3 s" in capsys.readouterr().err


RUBBISH = {
    "no text": (b"\xff\xfe\x00localhost", "holds '"),
    "no name": (b"localhost\na..b.c\n", ""),
    "a long label": (b"localhost\n" + 70 * b"a" + b".b.c.d\n", ""),
    "without an end": (b"", "takes longer than 3 s"),
}


@pytest.mark.parametrize(("printed", "words"), RUBBISH.values(), ids=RUBBISH)
def test_whatever_a_command_prints_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], printed: bytes, words: str
) -> None:
    """Once, its manager ended by a UnicodeError, and what hosts held was gone."""
    monkeypatch.setattr(host_list, "_SECONDS", 3.0)
    found = tmp_path / "found"
    found.write_bytes(b"localhost\n")
    command = f"test -s {found} && cat {found} || yes"
    with job_hosts(tmp_path, MorphingOptions(None, 1, discover_hosts=command)) as hosts:
        found.write_bytes(printed)
        time.sleep(BEAT_SECONDS)
        if words:
            wait_for(lambda: (hosts.poll_hosts(), words in capsys.readouterr().err)[1], words)
            assert set(hosts.listed) == {HOST}
        else:
            come_to(hosts, {HOST}, set(printed.decode().split()))


def test_the_managers_own_machine_keeps_its_keeper_when_it_is_taken_from_the_list(tmp_path: Path) -> None:
    """Once, that keeper ended the mpirun of a job on other hosts, and notices came no more."""
    machines = tmp_path / "machines"
    machines.write_text(f"{HOST}\n")
    with job_hosts(tmp_path, MorphingOptions(str(machines), 1)) as hosts:
        (tmp_path / "own").touch()
        machines.write_text(f"{OTHER}\n")
        come_to(hosts, set(), {OTHER})
        hosts.release([OTHER])
        time.sleep(0.5)
        assert hosts.links[HOST].is_up and (tmp_path / "own").exists()
        machines.write_text("127.0.0.1\n")
        come_to(hosts, {HOST}, {HOST})  # by another name of the same machine


class FakeLink:
    """A keeper that reaches no hosts but some."""

    address, port, is_answering = "", 0, True

    def __init__(self, host: str, reached: str) -> None:
        self.host, self._reached = host, reached

    def ask(self, do: str, others: list[tuple[str, str, int]]) -> Future[dict[str, str]]:
        answer: Future[dict[str, str]] = Future()
        answer.set_result({name: "no route" for name, _, _ in others if name not in self._reached})
        return answer


@pytest.mark.parametrize(
    ("reached", "left_out"),
    [("abcd abcd abcd abcd", ""), ("abcd a abcd abcd", "b"), ("abcd abd abcd abcd", "c"), ("ab ab cd cd", "cd")],
)
def test_the_fewest_hosts_are_left_out_so_that_the_others_reach_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: str, left_out: str
) -> None:
    with job_hosts(tmp_path, MorphingOptions(None, 1)) as hosts:
        links = {host: FakeLink(host, of_host) for host, of_host in zip("abcd", reached.split(), strict=True)}
        monkeypatch.setattr(hosts, "links", links)
        found = hosts.find_apart("abcd")
        assert "".join(sorted(found)) == left_out and all("no route" in why for why in found.values())
        monkeypatch.undo()


def test_a_slow_host_is_better_than_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slow_ranks, "_LASTING_SECONDS", -1.0)
    with job_hosts(tmp_path, MorphingOptions(None, 1)) as hosts:
        hosts.slow.begin({HOST: 1})
        hosts.slow.record([((HOST, 0), Slow(0, 30, 2.0, "its own past"))])
        assert hosts.slow.leaves_out(HOST) and set(hosts.usable()) == {HOST} and not hosts.slow.leaves_out(HOST)


@pytest.mark.parametrize(("faults", "usable"), [("a", "bc"), ("ab", "c"), ("abc", "abc")])
def test_a_host_that_cannot_import_what_ranks_do_is_used_if_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: str, usable: str
) -> None:
    with job_hosts(tmp_path, MorphingOptions(None, 1)) as hosts:
        faulty = {host: {"standby_fault": "no module"} if host in faults else {} for host in "abc"}
        links = {host: SimpleNamespace(report=report, fault="") for host, report in faulty.items()}
        monkeypatch.setattr(hosts, "links", links)
        monkeypatch.setattr(hosts, "up", lambda: links)
        monkeypatch.setattr(hosts, "listed", dict.fromkeys("abc", 1))
        assert "".join(hosts.usable()) == usable
        monkeypatch.undo()


def test_a_host_that_fails_is_left_out_for_longer_each_time_until_mpirun_can_start_something_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told once."""
    find_mpirun()
    can_start = module.can_start
    with job_hosts(tmp_path, MorphingOptions(None, 1, start_seconds=15.0)) as hosts:
        assert hosts.find_unfit([HOST, OTHER]) == [OTHER]
        assert hosts.can_do_without([OTHER]) and not hosts.can_do_without([HOST])
        monkeypatch.setattr(module, "_FAILED_SECONDS", 0.5)
        monkeypatch.setattr(module, "can_start", lambda host, *others: can_start(OTHER, *others))
        begin = time.monotonic()
        hosts.leave_out(HOST, "its memory is full")
        for _ in range(2):
            assert not look(hosts), "nothing can be started there"
        monkeypatch.setattr(module, "can_start", can_start)
        wait_for(lambda: look(hosts) == {HOST}, "the host")
        assert time.monotonic() - begin > 1.5
    said = capsys.readouterr().err
    assert said.count("is left out") == said.count("its memory is full") == 1


@pytest.mark.parametrize(("min_ranks", "left"), [(1, {HOST}), (2, set())])
def test_a_host_whose_ranks_are_asked_to_end_is_left_if_others_suffice(
    tmp_path: Path, min_ranks: int, left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_hosts(tmp_path, MorphingOptions(None, 1, min_ranks=1)) as hosts:
        monkeypatch.setattr(hosts, "_options", MorphingOptions(None, 1, min_ranks=min_ranks))
        monkeypatch.setattr(hosts, "usable", lambda: dict.fromkeys({HOST, OTHER} - hosts.noticed.keys(), 1))
        hosts.leave_if_others_suffice([HOST])
        assert hosts.noticed.keys() == left
        hosts.notice(HOST, 60.0)
        hosts.leave_if_others_suffice([HOST])
        assert hosts.noticed[HOST] < time.monotonic() + 61.0, "a notice stays as it was given"
