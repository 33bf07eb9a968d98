"""Holds what the emulated hosts promise: each has its own world, faults are what they say, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.hosts.emulation import ROOT, Hosts, reason_to_skip, wait_for


def test_each_host_has_a_world_of_its_own(two_hosts: Hosts):
    for host, other in (("h1", "h2"), ("h2", "h1")):
        two_hosts.run(host, "touch /tmp/mine /dev/shm/mine ~/mine")
        assert two_hosts.run(host, "hostname; echo $HOME; hostname -I").stdout.split() == [
            host,
            "/run/home",
            two_hosts.address(host),
        ]
        assert two_hosts.run(host, ["ssh", other, "hostname"]).stdout.strip() == other
    two_hosts.run("h1", "rm /tmp/mine ~/mine")
    assert two_hosts.leftovers("h1") == ["/dev/shm/mine"] and two_hosts.leftovers("h2") == [
        "/tmp/mine",
        "/dev/shm/mine",
    ]
    assert two_hosts.path("h2", "/run/home/mine").exists() and not two_hosts.path("h1", "/run/home/mine").exists()


def test_hosts_share_one_folder(two_hosts: Hosts):
    two_hosts.run("h1", f"echo word >{two_hosts.shared}/file")
    assert two_hosts.run("h2", f"cat {two_hosts.shared}/file").stdout == "word\n"
    assert not two_hosts.leftovers("h1")


def test_reset_leaves_nothing(two_hosts: Hosts):
    two_hosts.run("h1", f"mkdir /tmp/a; touch /tmp/a/b /dev/shm/c {two_hosts.shared}/d; sleep 600 >/dev/null 2>&1 &")
    two_hosts.cut("h1")
    two_hosts.kill("h2")
    two_hosts.reset()
    for host in two_hosts.names:
        assert not two_hosts.leftovers(host) and not two_hosts.processes(host)
    assert not list(two_hosts.shared.iterdir())
    assert two_hosts.run("h1", "ssh h2 hostname").stdout == "h2\n"


def test_a_cut_cable_is_told_to_nobody(two_hosts: Hosts):
    talk = two_hosts.start("h1", "ssh h2 'while sleep 0.1; do echo word; done'")
    assert talk.stdout is not None and talk.stdout.readline() == "word\n"
    two_hosts.cut("h2")
    time.sleep(1.0)
    assert talk.poll() is None
    assert two_hosts.run("h1", "ssh -o ConnectTimeout=1 h2 true", check=False).returncode == 255
    two_hosts.mend("h2")
    assert two_hosts.run("h1", "ssh h2 hostname").stdout == "h2\n"
    talk.end()


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_killed_host_says_goodbye_unless_its_power_is_lost(two_hosts: Hosts, power_loss: bool):
    talk = two_hosts.start("h1", "ssh h2 'echo word; sleep 600'")
    assert talk.stdout is not None and talk.stdout.readline() == "word\n"
    two_hosts.kill("h2", power_loss=power_loss)
    assert not two_hosts.is_up("h2") and not two_hosts.processes("h2")
    if power_loss:
        with pytest.raises(subprocess.TimeoutExpired):
            talk.wait(2.0)
    else:
        assert talk.wait(10.0) == 255
    talk.end()
    two_hosts.boot("h2")
    assert two_hosts.run("h1", "ssh h2 hostname").stdout == "h2\n"


def test_signals_reach_the_command(two_hosts: Hosts):
    command = two_hosts.start("h1", "trap 'echo told; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
    assert command.stdout is not None and command.stdout.readline() == "ready\n"
    command.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    command.terminate()
    command.send_signal(signal.SIGCONT)
    assert command.wait(10.0) == 7 and command.stdout.read() == "told\n"


def test_processes_can_be_killed_by_their_number(two_hosts: Hosts):
    command = two_hosts.start("h2", ["sleep", "612"])
    wait_for(lambda: bool(two_hosts.processes("h2", "sleep 612")), "sleep")
    ((pid, line),) = two_hosts.processes("h2", "sleep 612")
    assert line == "sleep 612" and not two_hosts.processes("h1", "sleep 612")
    os.kill(pid, signal.SIGKILL)
    assert command.wait(10.0) == -signal.SIGKILL


def test_a_command_that_takes_too_long_is_killed_with_all_it_started(two_hosts: Hosts):
    with pytest.raises(AssertionError, match=r"took longer than 0\.5 s\nbefore"):
        two_hosts.run("h1", "echo before; sleep 600 & sleep 600", timeout=0.5)
    assert not two_hosts.processes("h1")


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_hosts_end_with_the_process_that_made_them():
    script = (
        "from tests.hosts.emulation import *\nhosts = Hosts(1).__enter__()\nprint(hosts._first_pids['h1'], flush=True)"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", f"{script}\nprint(hosts.folder, flush=True); time.sleep(600)"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    pid, folder = int(maker.stdout.readline()), maker.stdout.readline().strip()
    maker.kill()
    maker.wait(10.0)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the host")
    subprocess.run(["rm", "-r", folder], check=True)


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_a_rate_limits_what_a_host_sends():
    with Hosts(2, rate="100mbit") as hosts:
        start = time.monotonic()
        hosts.run("h1", "head -c 12500000 /dev/zero | ssh h2 'cat >/dev/null'")
        assert 0.9 < time.monotonic() - start < 5.0


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_cables_delay_frames():
    with Hosts(2, rate="100mbit", delay_seconds=0.005) as hosts:
        seconds = [float(word) for word in hosts.run("h1", [sys.executable, "-c", ROUND_TRIPS]).stdout.split()]
        assert 0.0095 < sorted(seconds)[len(seconds) // 2] < 0.02, seconds
        hosts.cut("h2")
        assert hosts.run("h1", "ssh -o ConnectTimeout=1 h2 true", check=False).returncode == 255
        hosts.mend("h2")
        hosts.kill("h2", power_loss=True)
        hosts.boot("h2")
        assert hosts.run("h1", "ssh h2 hostname").stdout == "h2\n"


ROUND_TRIPS = """
import socket, time
for _ in range(20):
    start = time.perf_counter()
    socket.create_connection(("h2", 22)).close()
    print(time.perf_counter() - start)
"""
