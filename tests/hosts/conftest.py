"""Gives tests emulated hosts, which are made once for each number of them, and are as new for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.hosts.emulation import Hosts, reason_to_skip


@pytest.fixture(scope="session")
def _emulated() -> Iterator[Callable[[int], Hosts]]:
    """Returns what makes hosts, or finds those that it made."""
    made: dict[int, Hosts] = {}
    with ExitStack() as stack:

        def hosts(count: int) -> Hosts:
            if reason_to_skip():
                pytest.skip(reason_to_skip())
            if count not in made:
                made[count] = stack.enter_context(Hosts(count))
            return made[count]

        yield hosts


@pytest.fixture
def two_hosts(_emulated: Callable[[int], Hosts]) -> Iterator[Hosts]:
    """Returns two hosts as if they had just started."""
    hosts = _emulated(2)
    yield hosts
    hosts.reset()


@pytest.fixture
def three_hosts(_emulated: Callable[[int], Hosts]) -> Iterator[Hosts]:
    """Returns three hosts as if they had just started."""
    hosts = _emulated(3)
    yield hosts
    hosts.reset()
