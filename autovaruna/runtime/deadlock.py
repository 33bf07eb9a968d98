"""Defines `DeadlockDetector`, which knows where every rank waits, and finds waits that can never end.

Rank 0 keeps it. Each rank tells it what it does (`Join` a collective, `WaitReport` a long wait, `Leave` the
program), and it answers when all have come, or when they never can. It finds

- ranks that joined collectives with different labels;
- a rank that waits for one that has ended its script;
- ranks that wait for each other. Each report counts the messages that its rank has started, so an edge "X needs an
  act of Y that Y had not done when it began to wait" is a fact that stays true while Y waits; a set of waiting ranks
  where each has such an edge into the set can never go on (the AND model of distributed deadlock: Knapp, "Deadlock
  detection in distributed databases", ACM Computing Surveys 19 (4), 1987, section 2). Slow ranks are never accused.

A step of every rank passes here, so a notice takes as long whatever the number of ranks, and what many of them say
alike is one object: as bytes, an answer is then little more than what differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autovaruna.runtime.transport.values import pack, unpack

GRACE_SECONDS = 1.0

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
