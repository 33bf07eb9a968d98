"""Finds waits that can never end: `DeadlockDetector` knows where every rank waits, `RankWatch` waits for one.

Rank 0 keeps the detector. Each rank tells it what it does (`Join` a collective, `WaitReport` a long wait, `Leave` the
program), and it answers when all have come, or when they never can. It finds

- ranks that joined collectives with different labels;
- a rank that waits for one that has ended its script;
- ranks that wait for each other. Each report counts the messages that its rank has started, so an edge "X needs an
  act of Y that Y had not done when it began to wait" is a fact that stays true while Y waits; a set of waiting ranks
  where each has such an edge into the set can never go on (the AND model of distributed deadlock: Knapp, "Deadlock
  detection in distributed databases", ACM Computing Surveys 19 (4), 1987, section 2). Slow ranks are never accused.

A wait that is merely long is no error: after a while a waiting rank asks the detector where the others are, and says so
in the log; a rank 0 that does not answer is itself what all wait for.

A step of every rank passes here, so a notice takes as long whatever the number of ranks, and what many of them say
alike is one object: as bytes, an answer is then little more than what differs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from autovaruna.errors import RankError
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
GRACE_SECONDS = 1.0
_JOINED = "joined", -1, -1, -1

Event = tuple[str, int, int, int]
"""What a rank counts: ("sent" or "received", the other rank, channel, tag); -1 where one has no meaning."""


@dataclass(frozen=True, slots=True)
class Need:
    """An act that a waiting rank needs: that `rank` has done `event` at least `count` times."""

    rank: int
    event: Event
    count: int


class Join(NamedTuple):
    """A rank entered the collective `label`, with its value as bytes."""

    label: str
    value: bytes


class WaitReport(NamedTuple):
    """A rank has been waiting for a while: for what in words, what it needs, and what it had done before.

    No words: it no longer waits.
    """

    words: str
    needs: tuple[Need, ...]
    counts: dict[Event, int]


class Leave(NamedTuple):
    """A rank came to the end of its script."""

    counts: dict[Event, int]


class Ask(NamedTuple):
    """A rank has waited for long, and asks where the others are."""


class Places(NamedTuple):
    """Answers that, in words."""

    text: str


class JoinedValues(NamedTuple):
    """Answers a join: the values by rank, as bytes."""

    values: tuple[bytes, ...]


class Failure(NamedTuple):
    """Answers with an error; after a final one no rank can go on."""

    text: str
    is_final: bool


class Farewell(NamedTuple):
    """Answers a leave: all ranks have come to their end."""


Notice = Join | WaitReport | Leave
Answer = JoinedValues | Failure | Farewell
_NEWS = (Join, WaitReport, Leave, JoinedValues, Failure, Farewell, Ask, Places)


def encoded(news: Notice | Answer | Ask | Places) -> bytes:
    """Returns a notice or an answer as bytes; its class is a number in them, for it takes long to look one up."""
    return pack((_NEWS.index(type(news)), *news))


def decoded(data: bytes | bytearray) -> Any:
    kind, *parts = unpack(data)
    return _NEWS[kind](*parts)


@dataclass
class DeadlockDetector:
    """Collects notices of `num_ranks` ranks; `answer_all` tells each of them the same."""

    num_ranks: int
    answer_all: Callable[[Answer], None]
    failure: Failure | None = None
    joined: dict[int, Join] = field(default_factory=dict)
    reports: dict[int, WaitReport] = field(default_factory=dict)
    ended: dict[int, Leave] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)
    known: dict[bytes, bytes] = field(default_factory=dict)
    mismatch_since: float | None = None

    def record(self, rank: int, notice: Notice) -> None:
        """Records a notice of a rank, and answers if it can."""
        if self.failure is not None:
            return
        self.reports.pop(rank, None)
        if isinstance(notice, Join):
            self.joined[rank] = Join(notice.label, self.known.setdefault(notice.value, notice.value))
            self.labels.add(notice.label)
        elif isinstance(notice, Leave):
            self.ended[rank] = notice
        elif notice.words and rank not in self.ended:
            self.reports[rank] = notice
        self._answer()

    def tick(self) -> None:
        """Ends the grace of ranks that did not come after others had disagreed."""
        if self.mismatch_since is not None and time.monotonic() - self.mismatch_since > GRACE_SECONDS:
            self.fail(self._mismatch_text())

    def _answer(self) -> None:
        if len(self.ended) == self.num_ranks:
            self.answer_all(Farewell())
        elif self.joined and self.ended:
            self.fail(self._ended_text(min(self.ended), min(self.joined)))
        elif len(self.labels) > 1:
            self._disagree()
        elif len(self.joined) == self.num_ranks:
            values = tuple(self.joined[rank].value for rank in range(self.num_ranks))
            self._forget_joins()
            self.answer_all(JoinedValues(values))
        elif self.reports:
            self._look_for_stuck()

    def _disagree(self) -> None:
        if len(self.joined) == self.num_ranks:
            text = self._mismatch_text()
            self._forget_joins()
            self.answer_all(Failure(text, is_final=False))
        elif self.mismatch_since is None:
            self.mismatch_since = time.monotonic()

    def _forget_joins(self) -> None:
        self.joined.clear()
        self.labels.clear()
        self.known.clear()
        self.reports.clear()
        self.mismatch_since = None

    def _look_for_stuck(self) -> None:
        stuck = self._stuck()
        waiting = sorted(stuck - set(self.ended))
        gone = sorted(stuck & set(self.ended))
        if waiting and gone:
            first = next((rank for rank in waiting if gone[0] in self._blockers(rank)), waiting[0])
            self.fail(self._ended_text(gone[0], first))
        elif waiting:
            places = "; ".join(f"rank {rank} waits {self._place(rank)}" for rank in waiting)
            self.fail(f"ranks wait for each other and can never go on: {places}. Every rank must make the same calls.")

    def _stuck(self) -> set[int]:
        """Returns the largest set of ranks where each has ended, or needs an act of a rank in the set."""
        stuck = set(self.ended) | set(self.joined) | set(self.reports)
        is_smaller = True
        while is_smaller:
            kept = {rank for rank in stuck if rank in self.ended or self._blockers(rank) & stuck}
            is_smaller, stuck = kept != stuck, kept
        return stuck

    def _blockers(self, rank: int) -> set[int]:
        """Returns the ranks known not to have done what `rank` waits for."""
        if rank in self.joined:
            return set(range(self.num_ranks)) - set(self.joined)
        report = self.reports[rank]
        return {need.rank for need in report.needs if self._is_missing(need)}

    def _is_missing(self, need: Need) -> bool:
        source = self.ended.get(need.rank) or self.reports.get(need.rank)
        return source is not None and source.counts.get(need.event, 0) < need.count

    def _place(self, rank: int) -> str:
        if rank in self.joined:
            return f"in {self.joined[rank].label!r}"
        return self.reports[rank].words if rank in self.reports else "elsewhere"

    def places(self, asking: int) -> str:
        """Says where all ranks are but the one that asks, those first that are not here."""
        away = [rank for rank in range(self.num_ranks) if rank not in {asking, *self.joined, *self.reports}]
        gone = [rank for rank in away if rank in self.ended]
        words = [
            f"rank {rank} has not come: its script is elsewhere, or it is stopped" for rank in away if rank not in gone
        ]
        words += [f"rank {rank} has ended its script" for rank in gone]
        waiting = sorted({*self.joined, *self.reports} - {asking})
        return "; ".join(words + [f"rank {rank} waits {self._place(rank)}" for rank in waiting])

    def _ended_text(self, gone: int, waiting: int) -> str:
        return (
            f"rank {gone} ended its script while rank {waiting} waits {self._place(waiting)}. "
            "Every rank must make the same calls, the same number of times."
        )

    def _mismatch_text(self) -> str:
        places = (
            f"rank {rank} is in {self.joined[rank].label!r}"
            if rank in self.joined
            else f"rank {rank} is not in a collective call"
            for rank in range(self.num_ranks)
        )
        text = f"ranks are in different calls: {', '.join(places)}. Every rank must make the same calls, in one order."
        if any("checkpoint" in label for label in self.labels):
            text += " A script that saves and ends after a signal asks model.should_stop(): all ranks answer alike."
        return text

    def fail(self, text: str) -> None:
        """Tells every rank that none can go on, unless they know already."""
        if self.failure is not None:
            return
        self.failure = Failure(text, is_final=True)
        self.answer_all(self.failure)


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
