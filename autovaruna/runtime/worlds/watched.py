"""Defines `WatchedWorld`: a world in which no wait lasts for ever, for a hub at rank 0 knows what each rank waits for.

A rank counts what it does that others may wait for. One that waits for long tells the hub for what, and with which
counts; the hub answers once it has found that no rank can go on. Collectives go through the hub, too.
"""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from autovaruna.errors import RankError
from autovaruna.runtime.worlds.hub import Answer, Event, Failure, Farewell, Join, Leave, Need, Notice, Report, Values
from autovaruna.runtime.worlds.world import World

EAGER_SECONDS = 3e-3
"""So long a waiting rank looks many times before it rests; then once, and leaves its core to ranks that work."""
REPORT_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""How long a rank with an error waits for the others to hear of it; then it ends them."""


class WatchedWorld(World):
    """Several ranks with a hub at rank 0 that finds waits that cannot end.

    A transport fills the methods at the end, which carry notices to the hub and answers from it.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._counts: Counter[Event] = Counter()
        self._answers: deque[Answer] = deque()
        self._failure: Failure | None = None
        self._give_up: Callable[[], NoReturn] | None = None

    def gather_objects(self, value: object, what: str) -> list[Any]:
        """Returns the values that the ranks passed, by rank."""
        self.raise_failure()
        own = pickle.dumps(value)
        self.count(("joined", -1, -1, -1))
        self.tell(Join(what, own))
        answer = self._await_answer(f"in {what!r}")
        if isinstance(answer, Failure):
            raise RankError(answer.text)
        assert isinstance(answer, Values), answer
        known: dict[bytes, Any] = {own: value} if type(value) is tuple else {}  # what is alike need not be read
        for item in answer.values:
            if item not in known:
                known[item] = pickle.loads(item)
        return [known[item] for item in answer.values]

    def agree(self, error: BaseException | None, what: str, value: object = None) -> list[Any]:
        """Raises on every rank if any passes an error; ends those that do not come soon to hear of it."""
        if error is not None:
            self._give_up = partial(self.abort, error, f"rank {self.rank} failed while {what}")
        try:
            return super().agree(error, what, value)
        finally:
            self._give_up = None

    def leave(self) -> None:
        """Tells the others that this rank has come to its end, and waits until all have.

        Raises:
            RankError: another rank waits for an act of this one.
        """
        self.raise_failure()
        self.tell(Leave(dict(self._counts)))
        answer = self._await_answer("for the other ranks to end")
        assert isinstance(answer, Farewell), answer

    def _await_answer(self, words: str) -> Answer:
        self.wait_until(self._has_answer, lambda: (words, ()))
        return self._answers.popleft()

    def _has_answer(self) -> bool:
        self.listen()
        return bool(self._answers)

    def take_answer(self, answer: Answer) -> None:
        """Takes what the hub says: the answer to this rank's notice, or that no rank can go on."""
        if isinstance(answer, Failure) and answer.is_final:
            self._failure = answer
        else:
            self._answers.append(answer)

    # Waiting.

    def count(self, event: Event, num_times: int = 1) -> int:
        """Counts an act of this rank's script, which others may wait for; returns how often it has happened.

        Acts that happen by themselves while a rank waits, as the later messages of a reduction, are not counted:
        the hub takes it that a waiting rank does not act.
        """
        count = self._counts[event] = self._counts[event] + num_times
        return count

    def wait_until(self, is_done: Callable[[], bool], waiting: Callable[[], tuple[str, tuple[Need, ...]]]) -> None:
        """Blocks until `is_done()`; after a while tells the hub `waiting()`.

        Raises:
            RankError: the hub found that it can never be done.
        """
        started = now = 0.0
        has_reported, num_turns = False, 0
        while not is_done():
            num_turns += 1
            if num_turns & 31 and now - started < EAGER_SECONDS:
                continue
            now = time.monotonic()
            started = started or now
            self.advance()
            self.listen()
            self.raise_failure()
            if not has_reported and now - started > REPORT_SECONDS:
                has_reported = True
                self.tell(Report(*waiting(), dict(self._counts)))
            if self._give_up is not None and now - started > PATIENCE_SECONDS:
                self._give_up()
            self.rest(now - started)

    def num_acts(self) -> int:
        """Returns how often this rank's script has used the world."""
        return sum(self._counts.values())

    def raise_failure(self) -> None:
        """Raises what the hub has found, if anything."""
        if self._failure is not None:
            raise RankError(self._failure.text)

    # The transport.

    @abstractmethod
    def advance(self) -> None:
        """Lets what goes on by itself while this rank waits, such as reductions, advance; never blocks."""

    @abstractmethod
    def tell(self, notice: Notice) -> None:
        """Carries a notice to the hub; never blocks."""

    @abstractmethod
    def listen(self) -> None:
        """Passes what has come from the hub to `take_answer`; on rank 0, lets the hub work. Never blocks."""

    @abstractmethod
    def rest(self, waited_seconds: float) -> None:
        """Leaves the core to others for a moment that suits how long this rank has waited."""
