"""What hosts hold in memory is not lost where they are silent for a while, or where one of them has no room for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts

pytestmark = pytest.mark.timeout(300)
MOST_LOST = 40


@contextmanager
def training(hosts: Hosts, *options: str) -> Iterator[ElasticRun]:
    """Returns a job that trains; at the end of the context it ends well."""
    run = ElasticRun(hosts, [SCRIPT, "100000", "0.05"], options)
    try:
        run.wait_for_steps(MOST_LOST + 20)
        yield run
        run.stop_soon()
        assert run.finish() == 0 and run.matches_one_process(), run.text
        assert not leftovers(hosts, 10.0), run.text
    finally:
        run.end()


def go_on(run: ElasticRun, strike: Callable[[], object]) -> list[str]:
    """Strikes a job; returns the hosts on which it goes on from about where it was."""
    run.wait_for_steps(MOST_LOST + 20)
    newest, since = run.steps[-1][1], len(run.events)
    strike()
    run.wait_for_event("running", since)
    start = next(event for event in run.events[since:] if event["event"] == "start")
    assert start.get("step", -1) > newest - MOST_LOST, run.text
    return list(start["hosts"])


def test_hosts_that_are_silent_for_a_while_go_on_from_what_they_hold(hosts: Hosts):
    """Once, all keepers stopped for 6 s, or two hosts cut off and there again, were a start from step 0."""

    def stop_keepers() -> None:
        keepers = [run.process(host, "elastic.keeper") for host in hosts.names]
        for number, seconds in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
            for process in keepers:
                run.strike(process, number)
            time.sleep(seconds)

    def cut_two() -> None:
        for host in ("h2", "h3"):
            hosts.cut(host)
        time.sleep(8.0)
        for host in ("h2", "h3"):
            hosts.mend(host)

    with training(hosts) as run:
        go_on(run, stop_keepers)
        go_on(run, cut_two)


def test_a_host_whose_memory_is_full_is_left_out_and_told_once(hosts: Hosts):
    """Once, such a job was given up after 31 restarts."""

    def fill() -> None:
        with open(hosts.path("h2", "/dev/shm/full"), "wb") as file:
            room = os.statvfs(file.fileno())
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        run.strike(run.ranks()[0][1])

    with training(hosts) as run:
        assert go_on(run, fill) == ["h1", "h3"]
        run.wait_for_steps(200)
        assert sum("h2 is left out" in line for _, line in run.lines) == 1, run.text
        os.unlink(hosts.path("h2", "/dev/shm/full"))
