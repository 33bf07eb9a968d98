"""Ranks on several hosts train with the bits of one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.emulation import Hosts
from tests.mpi.launch import find_mpirun

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("train.py")
STEPS = 4


def trained(hosts: Hosts, ranks_of_host: Sequence[int]) -> list[str]:
    """Returns what the script prints with some ranks on each of the hosts."""
    listed = ",".join(f"{name}:{count}" for name, count in zip(hosts.names, ranks_of_host, strict=True))
    place = ["-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "--bind-to", "none", "--host", listed]
    command: list[str | Path] = [
        find_mpirun(),
        *place,
        "-n",
        str(sum(ranks_of_host)),
        sys.executable,
        SCRIPT,
        str(STEPS),
    ]
    return hosts.run("h1", command, timeout=120).stdout.splitlines()


@pytest.mark.parametrize("ranks_of_host", [(1, 1), (2, 1)])
def test_two_hosts_train_with_the_bits_of_one_process(two_hosts: Hosts, ranks_of_host: Sequence[int]):
    alone = two_hosts.run("h2", [sys.executable, SCRIPT, str(STEPS)], timeout=120).stdout.splitlines()
    assert len(alone) == STEPS + 1
    assert trained(two_hosts, ranks_of_host) == alone
