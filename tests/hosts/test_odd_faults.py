"""What is odd about hosts, lists and networks is told, and the job goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts

pytestmark = pytest.mark.timeout(600)
NEEDS = """
import os, runpy, sys, time
open("/run/home/data").close()
time.sleep(float(open("wait").read()))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs another script where there are data, after so many seconds."""
SECONDS = 180.0


def job(
    hosts: Hosts,
    *options: str,
    listed: tuple[str, ...] = (),
    script: tuple[str | Path, ...] = (),
    more: tuple[str, ...] = (),
) -> ElasticRun:
    """Starts a job, with `more` words for its script, and returns it once it trains."""
    words = [*(script or (SCRIPT,)), "100000", "0.05", *more]
    run = ElasticRun(hosts, words, ["--start_seconds", "20", *options], listed)
    try:
        run.wait_until_training_on(list(listed) or hosts.names, SECONDS)
        run.wait_for_steps(5)
    except BaseException:
        run.close()
        raise
    return run


def finish(run: ElasticRun) -> None:
    """Ends a job, of which nothing is missing and nothing left."""
    run.stop_soon()
    assert run.finish() == 0 and not run.differences(), run.text
    assert not leftovers(run.hosts, 20.0), run.text


def told(run: ElasticRun, words: str, since: int) -> None:
    """Waits for words about an event after some."""
    run.wait(lambda: any(words in event["text"] for event in run.events[since:]), words)


@contextmanager
def dropping(hosts: Hosts, one: str, other: str) -> Iterator[None]:
    """Drops all that a host sends to another one."""
    entry = [hosts.address(other), "dev", "eth0"]
    hosts.run(one, ["ip", "neigh", "replace", *entry, "lladdr", "02:00:00:00:00:77", "nud", "permanent"])
    yield
    hosts.run(one, ["ip", "neigh", "delete", *entry])


def test_a_host_on_which_the_script_fails_is_left_out_and_a_rank_that_is_stopped_before_it_trains_is_found(
    hosts: Hosts,
) -> None:
    """Once, the job was given up after three starts; and it waited for ever."""
    needs, wait = hosts.shared / "needs.py", hosts.shared / "wait"
    needs.write_text(NEEDS)
    wait.write_text("0")
    for host in ("h1", "h2"):
        hosts.path(host, "/run/home/data").touch()
    with closing(job(hosts, listed=("h1", "h2"), script=(needs, SCRIPT))) as run:
        since = len(run.events)
        run.list_hosts(hosts.names)
        told(run, "host h3 is left out, for 10 s at first: the job cannot be started with it: rank 2 ended", since)
        run.wait_until_training_on(["h1", "h2"], SECONDS)
        wait.write_text("5")
        hosts.path("h3", "/run/home/data").touch()
        run.wait(lambda: run.ranks().get(2, ("", 0))[0] == "h3", "the rank of h3", SECONDS)
        run.strike(run.ranks()[2][1], signal.SIGSTOP)
        wait.write_text("0")
        told(run, "rank 2 on h3 is stopped by a signal", since)
        run.wait_until_training_on(hosts.names, SECONDS)
        finish(run)


def test_lists_that_cannot_be_used_are_told_and_hosts_may_get_other_names(hosts: Hosts) -> None:
    """Once, the manager ended at one, with all that hosts held; and waited for ever for hosts that were there."""
    machines = hosts.shared / "machines"
    rubbish = (b"", b"\xff\0garbage\n", b"h1\nh2\nh3 h4\n", b"h1\n" * 5)
    with closing(job(hosts, "--min_ranks", "3", "--nstages", "1", "--batch_size", "4")) as run:
        since = len(run.events)
        for text in rubbish:
            count = len(run.events)
            machines.write_bytes(text)
            told(run, "the machine list is left as it was: ", count)
        run.list_hosts([hosts.address(host) for host in hosts.names])
        time.sleep(3.0)
        run.list_hosts([*hosts.names, "a..b.c"])
        told(run, "host a..b.c was added to the machine list", since)
        run.wait_for_steps(20)
        assert {event["event"] for event in run.events[since:]} <= {"list", "unreachable"}, run.text
        finish(run)


@pytest.mark.parametrize("is_copied", [True, False], ids=["copied", "there alone"])
def test_two_hosts_between_which_packets_are_dropped_while_they_train_are_not_used_together(
    hosts: Hosts, is_copied: bool
) -> None:
    """Once, a rank was blamed, and the next runs went to a host that is left out for what another one has, too.

    And where a part had no copy yet, three starts failed to read it, and the job was given up.
    """
    with closing(job(hosts) if is_copied else job(hosts, "--copy_share", "0.0003", more=("nowhere", "800"))) as run:
        newest, since = run.steps[-1][1], len(run.events)
        run.strike(run.process("h1", "prterun --hostfile"), signal.SIGSTOP)  # once, a rank was blamed for that, too
        run.wait_for_steps(20)
        with dropping(hosts, "h2", "h3"):
            told(run, "does not reach h3", since)
            run.wait(lambda: run.steps[-1][1] > newest + 50, "new steps", SECONDS)
            ended = next(event for event in run.events[since:] if event["event"] == "ended")
            assert "rank" not in ended["text"], run.text
        run.wait_until_training_on(hosts.names, SECONDS)
        finish(run)
