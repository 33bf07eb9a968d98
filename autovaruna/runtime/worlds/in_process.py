"""Defines `InProcessWorld`: ranks that are threads of one process, for tests of what ranks do together."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.channels.staging import flat
from autovaruna.runtime.worlds.connected import ConnectedWorld
from autovaruna.runtime.worlds.hub import Answer, Hub, Notice
from autovaruna.runtime.worlds.message import SMALL_BYTES
from autovaruna.runtime.worlds.world import DONE, Pending, describe

Result = TypeVar("Result")
_of_thread = threading.local()
Address = tuple[int, int, int, int]
"""Source, destination, channel, tag."""


class Mailboxes:
    """What the ranks share: the messages on the way, and the hub."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.RLock()
        self.messages: dict[tuple[Address, int], Tensor] = {}
        self.answers: list[list[Answer]] = [[] for _ in range(num_ranks)]
        self.hub = Hub(num_ranks, self._answer_all)

    def _answer_all(self, answer: Answer) -> None:
        for answers in self.answers:
            answers.append(answer)


class Delivery(Pending):
    """The n-th receive from an address, which takes the n-th message sent to it."""

    def __init__(self, mailboxes: Mailboxes, key: tuple[Address, int], buffer: Tensor) -> None:
        self._mailboxes = mailboxes
        self._key = key
        self._buffer = buffer
        self.needs_calls = buffer.nbytes > SMALL_BYTES

    def is_done(self) -> bool:
        """Fills the buffer if the message has come."""
        data = self._mailboxes.messages.pop(self._key, None)
        if data is None:
            return False
        buffer = flat(self._buffer).view(torch.uint8)
        if data.numel() != buffer.numel():
            raise RankError(f"rank {self._key[0][0]} sent {data.numel()} bytes where {buffer.numel()} were expected")
        buffer.copy_(data)
        return True

    def wait(self) -> None:
        """Blocks until it has finished; messages wait for all their parts together instead, and watch the others."""
        while not self.is_done():
            time.sleep(0)


class InProcessWorld(ConnectedWorld):
    """One rank of several in one process."""

    def __init__(self, rank: int, num_ranks: int, mailboxes: Mailboxes) -> None:
        super().__init__(rank, num_ranks)
        self.hosts = (socket.gethostname(),) * num_ranks
        self._mailboxes = mailboxes
        self._num_sent: Counter[Address] = Counter()
        self._num_received: Counter[Address] = Counter()

    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Pending:
        """Puts a copy into the mailbox of the destination."""
        address = self.rank, destination, channel, tag
        self._mailboxes.messages[address, self._num_sent[address]] = flat(tensor).view(torch.uint8).clone()
        self._num_sent[address] += 1
        return DONE

    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> Pending:
        """Takes a number in the order of receives from this address."""
        address = source, self.rank, channel, tag
        number = self._num_received[address]
        self._num_received[address] += 1
        return Delivery(self._mailboxes, (address, number), tensor)

    def tell(self, notice: Notice) -> None:
        """Carries a notice to the hub."""
        with self._mailboxes.lock:
            self._mailboxes.hub.take(self.rank, notice)

    def listen(self) -> None:
        """Passes on what the hub answers."""
        with self._mailboxes.lock:
            self._mailboxes.hub.tick()
            answers, self._mailboxes.answers[self.rank] = self._mailboxes.answers[self.rank], []
        for answer in answers:
            self.take_answer(answer)

    def rest(self, waited_seconds: float) -> None:
        """Lets the other threads run; a long wait becomes longer by a fiftieth at most."""
        time.sleep(0.0 if waited_seconds < 1e-3 else min(100e-6 + waited_seconds / 50, 3e-3))

    def abort(self, error: BaseException, where: str) -> NoReturn:
        """Ends the waits of all ranks with an error that quotes this one, and raises it."""
        self.fail(RankError(f"{where}: {describe(error)}"))
        raise error

    def fail(self, error: BaseException) -> None:
        """Lets the waits of all ranks end with the message of `error`, unless they already do."""
        with self._mailboxes.lock:
            self._mailboxes.hub.fail(str(error))


def make_worlds(num_ranks: int) -> list[InProcessWorld]:
    """Returns the worlds of `num_ranks` ranks that talk to each other."""
    mailboxes = Mailboxes(num_ranks)
    return [InProcessWorld(rank, num_ranks, mailboxes) for rank in range(num_ranks)]


def world_of_thread() -> InProcessWorld | None:
    """Returns the world of the rank that this thread is, None if it is none."""
    return getattr(_of_thread, "world", None)


def run_ranks(
    num_ranks: int, function: Callable[[InProcessWorld], Result], timeout_seconds: float = 500.0
) -> list[Result]:
    """Runs `function(world)` on each rank, a thread each; returns the results by rank.

    Raises:
        BaseException: the first error of any rank, once all have ended.
        TimeoutError: ranks had not ended in time.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    worlds = make_worlds(num_ranks)
    threads = [
        threading.Thread(target=run_rank, args=(world, function, results, errors), daemon=True) for world in worlds
    ]
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        worlds[0].fail(TimeoutError(f"ranks {late} took longer than {timeout_seconds} s"))
        raise TimeoutError(f"ranks {late} took longer than {timeout_seconds} s")
    return [results[rank] for rank in range(num_ranks)]


def run_rank(
    world: InProcessWorld,
    function: Callable[[InProcessWorld], Any],
    results: dict[int, Any],
    errors: list[BaseException],
) -> None:
    """Runs one rank to its end, and keeps its result or its error."""
    _of_thread.world = world
    try:
        results[world.rank] = function(world)
        world.leave()
    except BaseException as error:
        errors.append(error)
        world.fail(RankError(f"rank {world.rank} failed: {describe(error)}"))
