"""A job with a manager goes on, whatever happens to its ranks and hosts, as if nothing had happened."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.hosts.elastic_run import SCRIPT, ElasticRun
from tests.hosts.emulation import Hosts

pytestmark = pytest.mark.timeout(400)
NOTICED_SECONDS = 10.0
STEP_SECONDS = 0.05
NUM_STEPS = 700


@contextmanager
def job(run: ElasticRun) -> Iterator[ElasticRun]:
    """Kills a job at the end of the context that does not end by itself."""
    try:
        yield run
    finally:
        run.end()


def uninterrupted(hosts: Hosts, num_steps: int) -> list[str]:
    """Returns what the script prints in one process without a manager, but its first line."""
    return hosts.run("h1", [sys.executable, SCRIPT, str(num_steps), "0"], timeout=120).stdout.splitlines()[1:]


def blamed(run: ElasticRun, strike: Callable[[], object]) -> dict[str, Any]:
    """Strikes a job that trains, and returns what it says of the end of its run, once it trains again."""
    run.wait_for_steps(12)
    since = len(run.events)
    strike()
    at = time.time()
    ended = run.wait_for_event("ended", since)
    assert ended["time"] - at < NOTICED_SECONDS, ended
    run.wait_for_event("running", since)
    return ended


def test_a_job_survives_what_happens_to_ranks_and_hosts(three_hosts: Hosts):
    """One run of one job, struck by one fault after another; each is said as what it was."""
    hosts = three_hosts
    expected = uninterrupted(hosts, NUM_STEPS)
    with job(ElasticRun(hosts, [SCRIPT, str(NUM_STEPS), str(STEP_SECONDS)])) as run:
        for rank in (1, 0):
            ended = blamed(run, lambda rank=rank: run.strike(run.ranks()[rank][1]))
            assert f"rank {rank} was ended by SIGKILL" in ended["text"] and not ended["lost"]
        ended = blamed(run, lambda: run.strike(run.process("h1", "prterun --hostfile")))
        assert not ended["lost"] and not re.search(r"rank \d+ (was ended|ended)", ended["text"]), ended
        ended = blamed(run, lambda: run.strike(run.ranks()[2][1], signal.SIGSTOP))
        assert "rank 2 on h3 is stopped" in ended["text"] and not ended["lost"]

        run.wait_for_steps(12)
        since = len(run.events)
        run.strike(run.process("h2", "elastic.keeper"))
        run.wait_for_steps(60)
        assert not [event for event in run.events[since:] if event["event"] == "ended"], run.text

        for host, power_loss in (("h2", False), ("h3", True)):
            ended = blamed(run, lambda host=host, power_loss=power_loss: hosts.kill(host, power_loss))
            assert ended["lost"] == [host] and f"host {host} was lost" in ended["text"]
            since = len(run.events)
            hosts.boot(host)
            assert f"host {host} is there" in run.wait_for_event("ended", since)["text"]
            run.wait_for_event("running", since)
        assert run.finish() == 0, run.text
        printed = [f"loss {step} {loss}" for step, loss in run.losses()]
        weights = [line.partition("] ")[2] for _, line in run.lines if "] weights" in line]
        assert printed + weights == expected, run.text
        assert not run.leftovers(), run.text
