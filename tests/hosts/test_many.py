"""A job on sixteen hosts goes on as if nothing had happened, whatever happens to many of them at once."""

from __future__ import annotations

import signal
from contextlib import closing

import pytest

from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts, reason_to_skip
from tests.products import WHOLE

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not WHOLE, reason="sixteen starts take minutes of two cores: make test-whole"),
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
]
NUM_HOSTS = 16
MOST_LOST = 40
LONG_SECONDS = 300.0
PATIENT = ["--start_seconds", "200", "--state_wait_seconds", "5", "--slow_factor", "100", "--checkpoint_seconds", "2"]


def test_half_of_sixteen_hosts_are_lost_four_come_one_hangs_and_all_but_two_are_lost():
    """What half of them held is in memory of the others; what only those had that are lost at last is on disk."""
    with Hosts(NUM_HOSTS) as hosts:
        last = str(hosts.shared / "last")
        script = [SCRIPT, "100000", "0.05", last, "32", str(NUM_HOSTS)]
        with closing(ElasticRun(hosts, script, [*PATIENT, "--checkpoints", last])) as run:
            run.wait_until_training_on(hosts.names, LONG_SECONDS)
            run.wait_for_steps(60, LONG_SECONDS)
            half, newest = hosts.names[1::2], run.steps[-1][1]
            for host in half:
                hosts.kill(host)
            left = [host for host in hosts.names if host not in half]
            run.wait_until_training_on(left, LONG_SECONDS)
            starts = [event for event in run.events if event["event"] == "start"]
            assert starts[-1]["step"] > newest - MOST_LOST and set(starts[-1]["from"]) <= set(left), run.text
            lost = [host for event in run.events if event["event"] == "ended" for host in event["lost"]]
            assert lost and set(lost) <= set(half), run.text  # the rest die while the job ends for the first of them

            for host in half[:4]:
                hosts.boot(host)
            twelve = [host for host in hosts.names if host not in half[4:]]
            run.wait_until_training_on(twelve, LONG_SECONDS)
            run.wait_for_steps(20, LONG_SECONDS)

            since = len(run.events)
            run.strike(run.ranks()[5][1], signal.SIGSTOP)
            ended = run.wait_for_event("ended", since, LONG_SECONDS)
            assert "rank 5" in ended["text"] and "is stopped" in ended["text"] and not ended["lost"], run.text
            run.wait_until_training_on(twelve, LONG_SECONDS)
            run.wait_for_steps(60, LONG_SECONDS)

            for host in twelve[2:]:
                hosts.cut(host)
            for host in twelve[2:]:
                hosts.kill(host)
            run.wait_until_training_on(twelve[:2], LONG_SECONDS)
            run.stop_soon()
            assert run.finish(LONG_SECONDS) == 0 and not run.differences(), run.text
            assert not leftovers(hosts, 20.0), run.text
