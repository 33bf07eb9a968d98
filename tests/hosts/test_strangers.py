"""Who has no business with a job reads nothing of it and changes nothing, as docs/security.md says."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts

pytestmark = pytest.mark.timeout(600)
STRANGER = Path(__file__).with_name("stranger.py")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def ports_of(process: int) -> list[int]:
    """Returns the TCP ports at which a process listens, in whatever network it is."""
    own = {os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()}
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{process}/net/{name}").read_text().split("\n")]
    rows = [line.split() for line in lines]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3:4] == ["0A"] and f"socket:[{row[9]}]" in own]


def test_another_user_and_another_host_get_nothing_and_the_job_goes_on(hosts: Hosts):
    """Once, who got the port of a dead keeper was given weights, and left a part that was taken for the newest."""
    listed, call = ["h1", "h2"], [sys.executable, str(STRANGER)]
    with closing(ElasticRun(hosts, [SCRIPT, "100000", "0.05"], listed=listed)) as run:
        run.wait_until_training_on(listed)
        since = len(run.events)
        own = {"h1": run.process("h1", "-m autovaruna run"), "h2": run.process("h2", "elastic.keeper")}
        ports = {host: [*ports_of(process), *ports_of(run.ranks()[host == "h2"][1])] for host, process in own.items()}
        assert all(map(ports_of, own.values())), "the manager hears notices, a keeper its neighbours"
        for place, user in (("h2", NOBODY), ("h3", [])):
            for host, its in ports.items():
                attack = [*user, *call, "attack", hosts.address(host), host, *map(str, its)]
                said = hosts.run(place, attack, timeout=200.0).stdout
                assert said == "done\n", said
        run.wait_for_steps(10)
        assert not {event["event"] for event in run.events[since:]} & {"ended", "lost", "copies"}, run.text

        (port,) = ports_of(own["h2"])
        run.strike(own["h2"])
        run.wait(lambda: run.process("h2", "elastic.keeper") != own["h2"], "the keeper's end")
        stranger = hosts.start("h2", [*NOBODY, *call, "wait", str(port)])
        assert stranger.stdout is not None and stranger.stdout.readline() == "there\n"
        run.wait_for_steps(40)
        run.strike(run.ranks()[0][1], signal.SIGKILL)
        run.wait_for_event("running", since)
        stranger.end()
        assert "got" not in stranger.stdout.read()
        starts = [event["step"] for event in run.events[since:] if event["event"] == "start"]
        assert all(0 < step < 10**6 for step in starts), run.text
        run.stop_soon()
        assert run.finish() == 0 and not run.differences(), run.text
        assert not leftovers(hosts, 10.0), run.text
