"""Runs ranks as threads of one process, to test what they do together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from autovaruna.ranks.deadlock import Failure
from autovaruna.ranks.environment import of_this_thread
from autovaruna.ranks.transport.threads import Mailboxes, ThreadTransport
from autovaruna.ranks.transport.values import pack
from autovaruna.ranks.world import World, describe

Result = TypeVar("Result")


class RankThread(ThreadTransport):
    """A rank whose error ends the waits of all ranks, with an error that quotes it."""

    def abort(self, error: BaseException, where: str) -> NoReturn:
        self.fail(f"{where}: {describe(error)}")
        raise error

    def fail(self, text: str) -> None:
        for rank in range(len(self.hosts)):
            ThreadTransport.send_notice(self, pack(Failure(text)), rank)


def make_worlds(num_ranks: int, hosts: str = "") -> list[World]:
    """Returns the worlds of `num_ranks` ranks that talk to each other; a letter names the host of each."""
    mailboxes = Mailboxes(num_ranks)
    transports = [RankThread(rank, mailboxes) for rank in range(num_ranks)]
    for each in transports:
        each.hosts = tuple(hosts) or each.hosts
    return [World(each) for each in transports]


def run_ranks(
    num_ranks: int, function: Callable[[World], Result], timeout_seconds: float = 500.0, hosts: str = ""
) -> list[Result]:
    """Runs `function(world)` on each rank, a thread each; returns the results by rank, or raises the first error."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    worlds = make_worlds(num_ranks, hosts)
    given = function, results, errors
    threads = [threading.Thread(target=_run_rank, args=(world, *given), daemon=True) for world in worlds]
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        text = f"ranks {late} took longer than {timeout_seconds} s"
        _fail(worlds[0], text)
        raise TimeoutError(text)
    return [results[rank] for rank in range(num_ranks)]


def _run_rank(world: World, function: Callable[[World], Any], results: Any, errors: list[BaseException]) -> None:
    """Runs one rank to its end, and keeps its result or its error."""
    of_this_thread.world = world  # what asks for the world from here on gets this one
    try:
        results[world.rank] = function(world)
        world.leave()
    except BaseException as error:
        errors.append(error)
        _fail(world, f"rank {world.rank} failed: {describe(error)}")


def _fail(world: World, text: str) -> None:
    assert isinstance(world.transport, RankThread)
    world.transport.fail(text)
