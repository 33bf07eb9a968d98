"""Benchmarks run over hosts whose links take their time: `benchmarks/network.py`, `benchmarks/alternatives.py`."""

from __future__ import annotations

import sys

import pytest

from tests.hosts.emulation import ROOT, Hosts, reason_to_skip, wait_for

sys.path.insert(0, str(ROOT / "benchmarks"))

from delay import DelayingSwitch

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")]
DELAY_SECONDS = 0.05
CONNECT = """import socket, time
began = time.perf_counter()
socket.create_connection(("h2", 22), timeout=10).close()
print(time.perf_counter() - began)"""


def test_a_frame_takes_as_long_from_host_to_host_as_is_asked_for() -> None:
    with Hosts(2, switch=DelayingSwitch(DELAY_SECONDS)) as hosts:

        def seconds() -> float:
            return float(hosts.run("h1", [sys.executable, "-c", CONNECT]).stdout)

        wait_for(lambda: hosts.run("h1", [sys.executable, "-c", CONNECT], check=False).returncode == 0, "sshd of h2")
        assert min(seconds() for _ in range(3)) >= 2 * DELAY_SECONDS  # there and back
