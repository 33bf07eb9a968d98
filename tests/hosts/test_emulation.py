"""Holds what the emulated hosts promise: each has its own world, faults are what they say, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.hosts.emulation import ROOT, Hosts, reason_to_skip, wait_for


def test_each_host_has_a_world_of_its_own_but_for_one_folder(hosts: Hosts):
    for host, other in (("h1", "h2"), ("h2", "h1")):
        hosts.run(host, "touch /tmp/mine /dev/shm/mine ~/mine")
        said = hosts.run(host, "hostname; echo $HOME; hostname -I").stdout.split()
        assert said == [host, "/run/home", hosts.address(host)]
        assert hosts.run(host, ["ssh", other, "hostname"]).stdout.strip() == other
    hosts.run("h1", f"rm /tmp/mine ~/mine; echo word >{hosts.shared}/file")
    assert hosts.run("h2", f"cat {hosts.shared}/file").stdout == "word\n"
    assert hosts.leftovers("h1") == ["/dev/shm/mine"] and hosts.leftovers("h2") == ["/tmp/mine", "/dev/shm/mine"]
    assert hosts.path("h2", "/run/home/mine").exists() and not hosts.path("h1", "/run/home/mine").exists()


def test_reset_leaves_nothing(hosts: Hosts):
    hosts.run("h1", f"mkdir /tmp/a; touch /tmp/a/b /dev/shm/c {hosts.shared}/d; sleep 600 >/dev/null 2>&1 &")
    hosts.cut("h1")
    hosts.kill("h2")
    hosts.reset()
    for host in hosts.names:
        assert not hosts.leftovers(host) and not hosts.processes(host)
    assert not list(hosts.shared.iterdir())
    assert hosts.run("h1", "ssh h2 hostname").stdout == "h2\n"


def test_a_cut_cable_is_told_to_nobody(hosts: Hosts):
    talk = hosts.start("h1", "ssh h2 'while sleep 0.1; do echo word; done'")
    assert talk.stdout is not None and talk.stdout.readline() == "word\n"
    hosts.cut("h2")
    time.sleep(1.0)
    assert talk.poll() is None
    assert hosts.run("h1", "ssh -o ConnectTimeout=1 h2 true", check=False).returncode == 255
    hosts.mend("h2")
    assert hosts.run("h1", "ssh h2 hostname").stdout == "h2\n"
    talk.end()


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_killed_host_says_goodbye_unless_its_power_is_lost(hosts: Hosts, power_loss: bool):
    talk = hosts.start("h1", "ssh h2 'echo word; sleep 600'")
    assert talk.stdout is not None and talk.stdout.readline() == "word\n"
    hosts.kill("h2", power_loss=power_loss)
    assert not hosts.is_up("h2") and not hosts.processes("h2")
    if power_loss:
        with pytest.raises(subprocess.TimeoutExpired):
            talk.wait(2.0)
    else:
        assert talk.wait(10.0) == 255
    talk.end()
    hosts.boot("h2")
    assert hosts.run("h1", "ssh h2 hostname").stdout == "h2\n"


def test_commands_get_signals_and_end_with_all_that_they_started(hosts: Hosts):
    command = hosts.start("h1", "trap 'echo told; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
    assert command.stdout is not None and command.stdout.readline() == "ready\n"
    command.terminate()
    assert command.wait(10.0) == 7 and command.stdout.read() == "told\n"
    with pytest.raises(AssertionError, match=r"took longer than 0\.5 s\nbefore"):
        hosts.run("h1", "echo before; sleep 600 & sleep 600", timeout=0.5)
    assert not hosts.processes("h1")


def test_processes_can_be_killed_by_their_number(hosts: Hosts):
    command = hosts.start("h2", ["sleep", "612"])
    wait_for(lambda: bool(hosts.processes("h2", "sleep 612")), "sleep")
    ((pid, line),) = hosts.processes("h2", "sleep 612")
    assert line == "sleep 612" and not hosts.processes("h1", "sleep 612")
    os.kill(pid, signal.SIGKILL)
    assert command.wait(10.0) == -signal.SIGKILL


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_hosts_end_with_the_process_that_made_them():
    script = (
        "import time\nfrom tests.hosts.emulation import *\nhosts = Hosts(1).__enter__()\n"
        "print(hosts._first_pids['h1'], hosts.folder, flush=True); time.sleep(600)"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pid, folder = maker.stdout.readline().split()
    maker.kill()
    maker.wait(10.0)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the host")
    subprocess.run(["rm", "-r", folder], check=True)
