"""What hosts hold in memory is not lost where they are silent for a while, or where one of them has no room for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts

pytestmark = pytest.mark.timeout(300)
MOST_LOST = 40
OTHERS = ("h2", "h3")


def go_on(run: ElasticRun, strike: Callable[[ElasticRun], object]) -> list[str]:
    """Strikes a job that trains on all hosts; returns those on which it goes on from about where it was."""
    run.wait_until_training_on(run.hosts.names)
    run.wait_for_steps(MOST_LOST + 10)
    newest, since = run.steps[-1][1], len(run.events)
    strike(run)
    run.wait_for_event("running", since)
    start = next(event for event in run.events[since:] if event["event"] == "start")
    assert start.get("step", -1) > newest - MOST_LOST, run.text
    return list(start["hosts"])


def stop_keepers(run: ElasticRun) -> None:
    """Stops all keepers for 5 s; once, the job started from step 0."""
    keepers = [run.process(host, "elastic.keeper") for host in run.hosts.names]
    for number, seconds in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.0)):
        for process in keepers:
            run.strike(process, number)
        time.sleep(seconds)


def cut_off(run: ElasticRun) -> None:
    """Cuts two hosts of three off for 6 s; once, the job started from step 0."""
    for do, seconds in ((run.hosts.cut, 6.0), (run.hosts.mend, 0.0)):
        for host in OTHERS:
            do(host)
        time.sleep(seconds)


def fill(run: ElasticRun) -> None:
    """Fills the memory of a host and kills a rank; once, the job was started again 31 times, and given up."""
    with open(run.hosts.path("h2", "/dev/shm/filling"), "wb") as file:
        room = os.statvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
    run.strike(run.ranks()[0][1])


def test_a_job_goes_on_from_what_hosts_hold_though_all_are_silent_and_one_is_full(hosts: Hosts):
    run = ElasticRun(hosts, [SCRIPT, "100000", "0.05"])
    try:
        go_on(run, stop_keepers)
        go_on(run, cut_off)
        assert go_on(run, fill) == ["h1", "h3"]
        run.stop_soon()
        assert run.finish() == 0 and run.matches_one_process(), run.text
        assert sum("h2 is left out" in line for _, line in run.lines) == 1, run.text
        with suppress(FileNotFoundError):
            os.unlink(hosts.path("h2", "/dev/shm/filling"))
        assert not leftovers(hosts, 10.0), run.text
    finally:
        run.end()
