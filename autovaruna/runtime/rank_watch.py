"""Defines `RankWatch`, which waits on behalf of one rank, such that no wait lasts for ever.

A wait that is merely long is no error: after a while a waiting rank asks the detector on rank 0 where the others are,
and says so in the log; a rank 0 that does not answer is itself what all wait for.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from autovaruna.errors import RankError
from autovaruna.runtime.deadlock import (
    Answer,
    Ask,
    DeadlockDetector,
    Event,
    Failure,
    Farewell,
    Join,
    JoinedValues,
    Leave,
    Need,
    Notice,
    Places,
    WaitReport,
    decoded,
    encoded,
)
from autovaruna.runtime.transport.base import Transport
from autovaruna.runtime.transport.values import pack, unpack

logger = logging.getLogger(__name__)

EAGER_SECONDS = 3e-3
"""So long a waiting rank looks many times before it rests; then once, and leaves its core to ranks that work."""
REPORT_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""How long a rank with an error waits for the others to hear of it; then it ends them."""
ANSWER_SECONDS = 2.0
"""How long a rank waits for an answer to where the others are."""
STEPS = 20
"""So many predicted steps are a long wait."""
_JOINED = "joined", -1, -1, -1


@dataclass
class Stalls:
    """What is a long wait.

    Attributes:
        report_seconds: after so long it is told, and again each time that it has doubled.
        limit_seconds: after so long it ends all ranks; 0: never.
        step_seconds: of a predicted step, of which some must pass, too.
    """

    report_seconds: float = 30.0
    limit_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def first_seconds(self) -> float:
        """When a wait is told for the first time."""
        return max(self.report_seconds, STEPS * self.step_seconds)


Waiting = Callable[[], tuple[str, tuple[Need, ...]]]
"""Says in words and for the detector what a rank waits for."""


class RankWatch:
    """Waits on behalf of one rank.

    The rank counts what it does that others may wait for. If it waits for long it tells the detector for what, with
    these counts, and hears once no rank can go on. Collectives go through the detector, too.

    Attributes:
        counts: how often each act of this rank has happened.
        stalls: what is a long wait.
        places: where the others are, in words, as rank 0 has answered.
    """

    def __init__(self, transport: Transport, advance: Callable[[], None]) -> None:
        self.transport = transport
        self._advance = advance
        num_ranks = len(transport.hosts)
        self._detector = DeadlockDetector(num_ranks, self._answer_all) if transport.rank == 0 else None
        self._answers: deque[Answer] = deque()
        self._failure: Failure | None = None
        self.counts: Counter[Event] = Counter()
        self.stalls = Stalls()
        self.places = ""
        self._is_leaving = False

    def gather(self, value: object, label: str, give_up: Callable[[], NoReturn] | None = None) -> list[Any]:
        """Returns the values that the ranks passed, by rank; those that are alike may be one object. Collective.

        A small value, that can be packed. `label` is what the ranks do here, the same on each; `give_up` is called if
        the others do not come soon.

        Raises:
            RankError: ranks came with different labels, or a rank ended its script.
        """
        self.raise_failure()
        own = pack(value)
        self.counts[_JOINED] += 1
        self.send_notice(Join(label, own))
        answer = self._await_answer(f"in {label!r}", give_up)
        self._let_notices_leave()
        if isinstance(answer, Failure):
            raise RankError(answer.text)
        assert isinstance(answer, JoinedValues), answer
        known: dict[bytes, Any] = {own: value} if type(value) is tuple else {}  # what is alike need not be read
        for item in answer.values:
            if item not in known:
                known[item] = unpack(item)
        return [known[item] for item in answer.values]

    def leave(self) -> None:
        """Tells the others that this rank has come to its end, and waits until all have.

        Raises:
            RankError: another rank waits for an act of this one.
        """
        self.raise_failure()
        self._is_leaving = True
        self.send_notice(Leave(dict(self.counts)))
        answer = self._await_answer("for the other ranks to end")
        self._let_notices_leave()
        assert isinstance(answer, Farewell), answer

    def count(self, event: Event, num_times: int = 1) -> int:
        """Counts an act of this rank's script, which others may wait for; returns how often it has happened.

        Acts that happen by themselves while a rank waits, as the later messages of a sum, are not counted: the
        detector takes it that a waiting rank does not act.
        """
        count = self.counts[event] = self.counts[event] + num_times
        return count

    def wait_until(
        self,
        is_done: Callable[[], bool],
        waiting: Waiting,
        give_up: Callable[[], NoReturn] | None = None,
    ) -> None:
        """Blocks until `is_done()`; after a while tells the detector `waiting()`, and after a longer one gives up.

        Raises:
            RankError: it can never be done, or takes longer than the limit.
        """
        started = now = 0.0
        long_wait: LongWait | None = None
        num_turns = 0
        while not is_done():
            num_turns += 1
            if num_turns & 31 and now - started < EAGER_SECONDS:
                continue
            now = time.monotonic()
            started = started or now
            self._advance()
            self.listen()
            self.raise_failure()
            if now - started > REPORT_SECONDS:
                long_wait = long_wait or LongWait(self, waiting)
                long_wait.go_on(now - started)
            if give_up is not None and now - started > PATIENCE_SECONDS:
                give_up()
            self.transport.rest(now - started)
        if long_wait is not None and not self._is_leaving:
            self.send_notice(WaitReport("", (), {}))

    def raise_failure(self) -> None:
        """Raises what has been found, if anything."""
        if self._failure is not None:
            raise RankError(self._failure.text)

    def listen(self) -> None:
        """Takes the notices that have come; on rank 0, lets the detector work. Never blocks."""
        for source, data in self.transport.poll_notices():
            news = decoded(data)
            if isinstance(news, Places):
                self.places = news.text
            elif isinstance(news, Ask):
                assert self._detector is not None
                self.transport.send_notice(encoded(Places(self._detector.places(source))), source)
            elif self._detector is None or isinstance(news, Failure):
                self._record_answer(news)
            else:
                self._detector.record(source, news)
        if self._detector is not None:
            self._detector.tick()

    def send_notice(self, notice: Notice) -> None:
        if self._detector is None:
            self.transport.send_notice(encoded(notice), 0)
        else:
            self._detector.record(0, notice)

    def ask(self) -> None:
        """Asks where the others are; the answer comes to `places`, on rank 0 at once."""
        self.places = ""
        if self._detector is None:
            self.transport.send_notice(encoded(Ask()), 0)
        else:
            self.places = self._detector.places(0)

    def fail(self, text: str) -> None:
        """Ends the wait of this rank with an error, on rank 0 those of all."""
        if self._detector is not None:
            self._detector.fail(text)
        self._failure = self._failure or Failure(text, is_final=True)

    def _answer_all(self, answer: Answer) -> None:
        data = encoded(answer)
        for rank in range(1, len(self.transport.hosts)):
            self.transport.send_notice(data, rank)
        self._record_answer(answer)

    def _record_answer(self, answer: Answer) -> None:
        """Takes the answer to this rank's notice, or that no rank can go on."""
        if isinstance(answer, Failure) and answer.is_final:
            self._failure = self._failure or answer
        else:
            self._answers.append(answer)

    def _let_notices_leave(self) -> None:
        """Waits until the answers of rank 0 have left: others wait for them, whatever it does next."""
        if self._detector is not None and not self.transport.are_notices_out():
            self.wait_until(self.transport.are_notices_out, lambda: ("for a notice to leave", ()))

    def _await_answer(self, words: str, give_up: Callable[[], NoReturn] | None = None) -> Answer:
        if not self._answers:
            self.wait_until(self._has_answer, lambda: (words, ()), give_up)
        return self._answers.popleft()

    def _has_answer(self) -> bool:
        self.listen()
        return bool(self._answers)


class LongWait:
    """A wait that has lasted for a while: tells the detector, and later the log, what is waited for."""

    def __init__(self, watch: RankWatch, waiting: Waiting) -> None:
        self._watch = watch
        self._words, needs = waiting()
        self._logged_at = 0.0
        self._asked_at: float | None = None
        watch.send_notice(WaitReport(self._words, needs, dict(watch.counts)))

    def go_on(self, waited: float) -> None:
        """Asks where the others are, tells the log, and ends the wait, each at its time in seconds; never blocks."""
        watch, stalls = self._watch, self._watch.stalls
        limit = stalls.limit_seconds and max(stalls.limit_seconds, REPORT_SECONDS)
        asks_at = max(stalls.first_seconds, 2 * self._logged_at)
        if self._asked_at is None and waited > (min(asks_at, limit) if limit else asks_at):
            self._asked_at = waited
            watch.ask()
        if self._asked_at is None or not (watch.places or waited > self._asked_at + ANSWER_SECONDS):
            return
        places = watch.places or "rank 0 does not say where the others are: it computes for long, or is stopped"
        text = f"rank {watch.transport.rank} has waited {waited:.0f} s {self._words}: {places}."
        self._asked_at, self._logged_at = None, waited
        if not limit or waited < limit:
            logger.warning("%s", text)
        else:
            watch.fail(f"{text} The job ends, since stall_limit_seconds is {stalls.limit_seconds:g}.")
