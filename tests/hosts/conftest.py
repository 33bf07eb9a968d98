"""Gives tests three emulated hosts, which are made once, and are as new for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.emulation import Hosts, reason_to_skip


@pytest.fixture(scope="session")
def _emulated() -> Iterator[Hosts]:
    if reason_to_skip():
        pytest.skip(reason_to_skip())
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(_emulated: Hosts) -> Iterator[Hosts]:
    """Returns the hosts as if they had just started."""
    yield _emulated
    _emulated.reset()
