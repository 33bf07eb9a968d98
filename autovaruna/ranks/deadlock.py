"""Finds waits that can never end: `DeadlockDetector` knows where every rank waits, `RankWatch` waits for one.

Rank 0 keeps the detector. A rank that has waited for half a second tells it where (`WaitReport`, `Leave` for the end of
its script), and it answers when it finds

- ranks that are in different collectives;
- a rank that waits for one that has ended its script;
- ranks that wait for each other. Each report counts the messages that its rank has started, so an edge "X needs an
  act of Y that Y had not done when it began to wait" is a fact that stays true while Y waits; a set of waiting ranks
  where each has such an edge into the set can never go on (the AND model of distributed deadlock: Knapp, "Deadlock
  detection in distributed databases", ACM Computing Surveys 19 (4), 1987, section 2). Slow ranks are never accused.

A wait that is merely long is no error: after a while a waiting rank asks the detector where the others are, and says so
in the log; a rank 0 that does not answer is itself what all wait for. What ranks tell each other in time, each
`RankExchange`, does not pass here.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from autovaruna.errors import RankError
from autovaruna.ranks.exchange import LABEL, Parts, RankExchange, digest, keep_part
from autovaruna.ranks.transport.base import EAGER_SECONDS, Transport
from autovaruna.ranks.transport.values import pack, unpack

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""How long a rank with an error waits for the others to hear of it; then it ends them."""
ANSWER_SECONDS = 2.0
"""How long a rank waits for an answer to where the others are."""
STEPS = 20
"""So many predicted steps are a long wait."""
JUDGEMENT_SECONDS, GRACE_SECONDS = 0.1, 0.4
"""How often reports are judged, and how long what was found waits for reports of other ranks, so that it names them."""
_MOST_NAMED = 16
"""Ranks whose places one text says."""
_EVERY = -1
_JOINED = "joined", -1, -1, -1

Event = tuple[str, int, int, int]
"""What a rank counts: ("sent" or "received", the other rank, channel, tag); -1 where one has no meaning."""


@dataclass(frozen=True, slots=True)
class Need:
    """An act that a waiting rank needs: that `rank`, or every one, has done `event` at least `count` times."""

    rank: int
    event: Event
    count: int


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


class Failure(NamedTuple):
    """Tells that no rank can go on."""

    text: str


Notice = WaitReport | Leave


@dataclass
class DeadlockDetector:
    """Collects notices of `num_ranks` ranks; `tell_all` tells each of them that none can go on."""

    num_ranks: int
    tell_all: Callable[[Failure], None]
    failure: Failure | None = None
    reports: dict[int, WaitReport] = field(default_factory=dict)
    ended: dict[int, Leave] = field(default_factory=dict)
    _judge_at: float = 0.0
    _found_at: float = 0.0

    def record(self, rank: int, notice: Notice) -> None:
        """Records a notice of a rank."""
        self.reports.pop(rank, None)
        if isinstance(notice, Leave):
            self.ended[rank] = notice
        elif notice.words and rank not in self.ended:
            self.reports[rank] = notice

    def tick(self) -> None:
        """Judges the reports from time to time, and says what was found a moment later."""
        if not self.reports or self.failure is not None or (now := time.monotonic()) < self._judge_at:
            return
        self._judge_at = now + JUDGEMENT_SECONDS
        text = self.finding()
        self._found_at = (self._found_at or now) if text else 0.0
        if text and now > self._found_at + GRACE_SECONDS:
            self.fail(text)

    def finding(self) -> str:
        """Says why no rank can go on, by what is known; empty: they may."""
        blockers = self._blockers()
        stuck = _stuck(blockers, self.ended)
        waiting, gone = sorted(stuck - set(self.ended)), sorted(stuck & set(self.ended))
        if waiting and gone:
            first = next((rank for rank in waiting if gone[0] in blockers[rank]), waiting[0])
            return ended_text(gone[0], f"rank {first} waits {self.reports[first].words}")
        calls = self._newest_calls()
        if len(set(calls.values())) > 1:
            return mismatch_text(calls, self.num_ranks)
        if not waiting:
            return ""
        places = _listed([f"rank {rank} waits {self.reports[rank].words}" for rank in waiting])
        return f"ranks wait for each other and can never go on: {places}. Every rank must make the same calls."

    def _blockers(self) -> dict[int, Collection[int]]:
        """Returns the ranks known not to have done what each waiting rank waits for."""
        known: dict[int, Mapping[Event, int]] = {rank: each.counts for rank, each in self.ended.items()}
        known |= {rank: each.counts for rank, each in self.reports.items()}

        def lacks(rank: int, need: Need) -> bool:
            return rank in known and known[rank].get(need.event, 0) < need.count

        @lru_cache
        def lacking(need: Need) -> frozenset[int]:
            return frozenset(rank for rank in (known if need.rank == _EVERY else (need.rank,)) if lacks(rank, need))

        return {rank: frozenset().union(*map(lacking, each.needs)) for rank, each in self.reports.items()}

    def _newest_calls(self) -> dict[int, str]:
        """Returns where the ranks are that wait in the latest collective: a report of an earlier one is old."""
        needs = {rank: each.needs[0] for rank, each in self.reports.items() if each.needs}
        numbers = {rank: need.count for rank, need in needs.items() if need.rank == _EVERY}
        newest = max(numbers.values(), default=0)
        return {rank: self.reports[rank].words for rank in sorted(numbers) if numbers[rank] == newest}

    def places(self, asking: int) -> str:
        """Says where all ranks are but the one that asks, those first that are not here."""
        away = [rank for rank in range(self.num_ranks) if rank not in {asking, *self.reports}]
        gone = [rank for rank in away if rank in self.ended]
        words = [
            f"rank {rank} has not come: its script is elsewhere, or it is stopped" for rank in away if rank not in gone
        ]
        words += [f"rank {rank} has ended its script" for rank in gone]
        waiting = sorted(set(self.reports) - {asking})
        return _listed(words + [f"rank {rank} waits {self.reports[rank].words}" for rank in waiting])

    def fail(self, text: str) -> None:
        """Tells every rank that none can go on, unless they know already."""
        if self.failure is None:
            self.failure = Failure(text)
            self.tell_all(self.failure)


def _stuck(blockers: Mapping[int, Collection[int]], ended: Collection[int]) -> set[int]:
    """Returns the largest set of ranks where each has ended, or needs an act of a rank in the set."""
    stuck = {*ended, *blockers}
    is_smaller = True
    while is_smaller:
        kept = {rank for rank in stuck if rank in ended or not stuck.isdisjoint(blockers[rank])}
        is_smaller, stuck = kept != stuck, kept
    return stuck


def _listed(texts: list[str]) -> str:
    more = [f"and {len(texts) - _MOST_NAMED} more"] * (len(texts) > _MOST_NAMED)
    return "; ".join(texts[:_MOST_NAMED] + more)


def ended_text(gone: int, waiting: str) -> str:
    text = (
        f"rank {gone} ended its script while {waiting}. Every rank must make the same calls, the same number of times."
    )
    return text + _advice([waiting])


def mismatch_text(calls: Mapping[int, str], num_ranks: int) -> str:
    """Returns the error of ranks that are in different calls; `calls` says in which."""
    places = [f"rank {rank} is {calls.get(rank, 'not in a collective call')}" for rank in range(num_ranks)]
    text = f"ranks are in different calls: {', '.join(places)}. Every rank must make the same calls, in one order."
    return text + _advice(calls.values())


def _advice(calls: Iterable[str]) -> str:
    """Returns what a script often means by calls that some ranks alone make."""
    text = "".join(calls)
    if "checkpoint" in text:
        return " A script that saves and ends after a signal asks model.should_stop(): all ranks answer alike."
    if "state_dict" in text or "optimizer state" in text:
        return (
            " state_dict() collects what all ranks hold: state = model.state_dict() on every rank, the optimizer's "
            "likewise, and then torch.save(state, path) on one."
        )
    return ""


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
    these counts, and hears once no rank can go on.

    Attributes:
        counts: how often each act of this rank has happened.
        stalls: what is a long wait.
        places: where the others are, in words, as rank 0 has answered.
    """

    def __init__(self, transport: Transport, advance: Callable[[], None]) -> None:
        self.transport, self._advance = transport, advance
        self._detector = DeadlockDetector(len(transport.hosts), self._notify_all) if transport.rank == 0 else None
        self._failure: Failure | None = None
        self._parts: Parts = {}
        self._num_exchanges = 0
        self._exchange: RankExchange | None = None  # the last one: of one that was left, MPI may still write its memory
        self.counts: Counter[Event] = Counter()
        self.stalls = Stalls()
        self.places = ""
        self.is_leaving = False

    def exchange(
        self,
        label: str,
        alike: bytes = b"",
        flags: int = 0,
        block: bytes | None = None,
        give_up: Callable[[], NoReturn] | None = None,
    ) -> RankExchange:
        """Exchanges with all ranks what must be `alike`, flags and a block, and returns it done. Collective.

        `label` is what the ranks do here, the same on each; `give_up` is called if the others do not come soon.

        Raises:
            RankError: ranks came with different labels, or a rank ended its script.
        """
        self.raise_failure()
        words = f"in {label!r}" if label else "for the other ranks to end"
        if label:
            self.counts[_JOINED] += 1
        found = self._run(words, (_digest(label), digest(alike)), flags, block, give_up)
        if found.differs(LABEL):
            self._raise_mismatch(words if label else "")
        return found

    def _run(
        self,
        words: str,
        digests: tuple[int, int],
        flags: int,
        block: bytes | None,
        give_up: Callable[[], NoReturn] | None = None,
    ) -> RankExchange:
        self._num_exchanges += 1
        exchange = RankExchange(self.transport, self._parts, self._num_exchanges, digests, flags, block)
        self._exchange = exchange

        def is_done() -> bool:
            if exchange.needs_notices:
                self.listen()
            return exchange.is_done()

        if not is_done():
            needs = (Need(_EVERY, _JOINED, self.counts[_JOINED]),)
            self.wait_until(is_done, lambda: (words, needs), give_up)
        if not self.transport.are_notices_out():  # others wait for them, whatever this rank does next
            self.wait_until(self.transport.are_notices_out, lambda: ("for a notice to leave", ()))
        return exchange

    def _raise_mismatch(self, own: str) -> NoReturn:
        """Raises the error of ranks that are in different calls; `own` is this rank's, empty at its end. Collective."""
        found = self._run(own, (0, 0), 0, own.encode())
        calls = {rank: block.decode() for rank, block in enumerate(found.blocks())}
        ended = [rank for rank, words in calls.items() if not words]
        if not ended:
            raise RankError(mismatch_text(calls, len(calls)))
        waiting = next(rank for rank, words in calls.items() if words)
        self._failure = Failure(ended_text(ended[0], f"rank {waiting} waits {calls[waiting]}"))
        raise RankError(self._failure.text)

    def gather(self, value: object, label: str, give_up: Callable[[], NoReturn] | None = None) -> list[Any]:
        """Returns the values that the ranks passed, by rank; those that are alike may be one object. Collective.

        A small value, that can be packed. Of values that are alike, one travels. Raises as `exchange`.
        """
        data = pack(value)
        own = digest(data).to_bytes(8, "little")
        digests = self.exchange(label, block=own, give_up=give_up).blocks()
        values = {own: value if type(value) is tuple else unpack(data)}  # what is alike need not be read
        if len(set(digests)) > 1:
            is_first = digests.index(own) == self.transport.rank
            texts = self.exchange(label, block=data if is_first else b"").blocks()
            values |= {each: unpack(text) for each, text in zip(digests, texts, strict=True) if text and each != own}
        return [values[each] for each in digests]

    def leave(self) -> None:
        """Waits until all ranks have come to their end.

        Raises:
            RankError: another rank waits for an act of this one.
        """
        self.is_leaving = True
        self.exchange("")

    def count(self, event: Event, num_times: int = 1) -> int:
        """Counts an act of this rank's script, which others may wait for; returns how often it has happened.

        Acts that happen by themselves while a rank waits, as the later messages of a sum, are not counted: the
        detector takes it that a waiting rank does not act.
        """
        count = self.counts[event] = self.counts[event] + num_times
        return count

    def wait_until(
        self, is_done: Callable[[], bool], waiting: Waiting, give_up: Callable[[], NoReturn] | None = None
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
                os.sched_yield()  # to a process that is not ours, too
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
        if long_wait is not None and not self.is_leaving:
            self.notify(0, WaitReport("", (), {}))

    def raise_failure(self) -> None:
        """Raises what has been found, if anything."""
        if self._failure is not None:
            raise RankError(self._failure.text)

    def listen(self) -> None:
        """Handles the notices that have come; on rank 0, lets the detector work. Never blocks."""
        for source, data in self.transport.poll_notices():
            if not keep_part(data, self._parts):
                self._handle(unpack(data), source)
        if self._detector is not None:
            self._detector.tick()

    def notify(self, rank: int, notice: Notice | Failure | Ask | Places) -> None:
        """Sends a notice to a rank; handles it at once if that is this one."""
        if rank == self.transport.rank:
            self._handle(notice, rank)
        else:
            self.transport.send_notice(pack(notice), rank)

    def _handle(self, notice: Any, source: int) -> None:
        match notice:
            case Places(text):
                self.places = text
            case Failure():
                self._failure = self._failure or notice
            case Ask():
                assert self._detector is not None
                self.notify(source, Places(self._detector.places(source)))
            case _:
                assert self._detector is not None
                self._detector.record(source, notice)

    def fail(self, text: str) -> None:
        """Ends the wait of this rank with an error, on rank 0 those of all."""
        if self._detector is not None:
            self._detector.fail(text)
        self._failure = self._failure or Failure(text)

    def _notify_all(self, failure: Failure) -> None:
        for rank in range(len(self.transport.hosts)):
            self.notify(rank, failure)


@lru_cache(maxsize=256)
def _digest(label: str) -> int:
    return digest(label.encode())


class LongWait:
    """A wait that has lasted for a while: tells the detector, and later the log, what is waited for."""

    def __init__(self, watch: RankWatch, waiting: Waiting) -> None:
        self._watch = watch
        self._words, needs = waiting()
        self._logged_at = 0.0
        self._asked_at: float | None = None
        counts = dict(watch.counts)
        watch.notify(0, Leave(counts) if watch.is_leaving else WaitReport(self._words, needs, counts))

    def go_on(self, waited: float) -> None:
        """Asks where the others are, tells the log, and ends the wait, each at its time in seconds; never blocks."""
        watch, stalls = self._watch, self._watch.stalls
        limit = stalls.limit_seconds and max(stalls.limit_seconds, REPORT_SECONDS)
        asks_at = max(stalls.first_seconds, 2 * self._logged_at)
        if self._asked_at is None and waited > (min(asks_at, limit) if limit else asks_at):
            self._asked_at = waited
            watch.places = ""  # the answer comes there, on rank 0 at once
            watch.notify(0, Ask())
        if self._asked_at is None or not (watch.places or waited > self._asked_at + ANSWER_SECONDS):
            return
        places = watch.places or "rank 0 does not say where the others are: it computes for long, or is stopped"
        text = f"rank {watch.transport.rank} has waited {waited:.0f} s {self._words}: {places}."
        self._asked_at, self._logged_at = None, waited
        if not limit or waited < limit:
            logger.warning("%s", text)
        else:
            watch.fail(f"{text} The job ends, since stall_limit_seconds is {stalls.limit_seconds:g}.")
