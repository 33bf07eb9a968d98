"""Finds slow and hung ranks by what ranks report: `Health` is told, and says; it starts nothing and looks at no clock.

**Slow.** What a rank computes in a step is compared with its own first steps, and with what the plan predicts of it.
Both are taken relative to the other ranks, so a machine that is slower as a whole names nobody. Single steps count for
little: a rank is slow where the middle of ten steps is, and most of them one by one.

**Hung.** Ranks say where they are while a step lasts: that they wait, for which ranks, or that they do not. Where no
rank ends a step any more, those are hung that others wait for and that wait for nobody, or that say nothing at all. How
long that takes to be said follows from the steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, median_low

from autovaruna.planner.records import Plan

SLOW = 1.10
"""So many times as long as before, or as predicted, is slow."""
MEASURED_SLOW = 1.08
"""What is measured of that over some steps, at the least."""
RECOVERED = 1.05
WINDOW_STEPS = 10
FIRST_STEPS = 20
"""The steps that a rank's own past is made of: its first."""
_SLOW_STEPS = 7
"""So many of a window are slower than `RECOVERED`, each by itself: neither hiccups nor a common change are slowness."""
_MISSING_STEPS = 100
"""After so many, a step that some rank has not reported is judged without it."""

SILENT_SECONDS = 5.0
"""After so long a rank that says nothing is stopped, where no rank ends a step: those that run speak each second."""
BUSY_SECONDS = 15.0
"""The least time after which a rank that others wait for is hung though it says that it runs."""
HUNG_STEPS = 20
LONGER_THAN_EVER = 3.0
"""A rank that runs is hung after so many steps, and after so many times its longest one yet."""


@dataclass(frozen=True)
class Report:
    """A rank has ended a step.

    Attributes:
        rank: Which one.
        step: The step's number; they ascend.
        seconds: What its stages computed in it, waits not counted.
        time: When it was heard, in seconds of any clock.
    """

    rank: int
    step: int
    seconds: float
    time: float


@dataclass(frozen=True)
class Place:
    """Where a rank is in its step.

    Attributes:
        rank: Which one.
        time: When it was heard.
        words: Where it is, for people.
        waits_for: The ranks that it waits for; empty: it waits for none.
    """

    rank: int
    time: float
    words: str
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slow:
    """A rank has become slow.

    Attributes:
        rank: Which one.
        step: The step after which that was seen.
        factor: How many times as long it takes, the other ranks' common factor taken out.
        compared_with: ``its own past`` or ``the prediction``.
    """

    rank: int
    step: int
    factor: float
    compared_with: str


@dataclass(frozen=True)
class Recovered:
    """A slow rank is as fast as it should be again."""

    rank: int
    step: int


@dataclass(frozen=True)
class Hung:
    """A rank makes no progress while others wait for it.

    Attributes:
        rank: Which one.
        seconds: Since when no rank has ended a step.
        words: Where it is.
        is_silent: Whether it does not even say so: it is stopped, or gone.
        waiting: The ranks that wait for it, some by way of others.
    """

    rank: int
    seconds: float
    words: str
    is_silent: bool
    waiting: tuple[int, ...]


def predicted_seconds(plan: Plan) -> dict[int, float]:
    """Returns what the stages of each rank compute in a step, in seconds, by rank."""
    seconds = dict.fromkeys(range(plan.num_ranks), 0.0)
    for stage in plan.stages:
        backward = stage.input_seconds + stage.weight_seconds if stage.deferred else stage.backward_seconds
        each = stage.forward_seconds + stage.recompute_seconds + backward
        for place, rank in enumerate(stage.ranks):
            count = len(range(place, plan.num_micro_batches, len(stage.ranks)))
            seconds[rank] += count * each / (stage.speeds[place] if stage.speeds else 1.0)
    return seconds


class Health:
    """What is known of the ranks of one job: a restart begins a new one.

    Args:
        predicted: What the stages of each rank compute in a step, in seconds; see `predicted_seconds`.
        step_seconds: The predicted step.
        time: When the job started.
    """

    def __init__(self, predicted: Mapping[int, float], step_seconds: float, time: float) -> None:
        self._speeds = Speeds(predicted)
        self._progress = Progress(sorted(predicted), step_seconds, time)

    def report(self, report: Report) -> list[Slow | Recovered]:
        """Hears that a rank has ended a step; returns which ranks have become slow with it, or are so no more."""
        self._progress.report(report)
        return self._speeds.report(report)

    def tell(self, place: Place) -> None:
        """Hears where a rank is; ranks that run say so each second."""
        self._progress.tell(place)

    def end(self, rank: int) -> None:
        """Hears that a rank has ended its script: it is waited for no more."""
        self._progress.end(rank)

    def slow(self) -> dict[int, Slow]:
        """Returns the ranks that are slow now."""
        return dict(self._speeds.slow)

    def hung(self, time: float) -> list[Hung]:
        """Returns the ranks that are hung at a moment."""
        return self._progress.hung(time)


class Speeds:
    """Compares ranks with their past, the prediction and each other.

    Args:
        predicted: Seconds of a step by rank.

    Attributes:
        slow: The slow ones, with what was said of them.
    """

    def __init__(self, predicted: Mapping[int, float]) -> None:
        self.slow: dict[int, Slow] = {}
        self._last = dict.fromkeys(predicted, -1)
        self._pending: dict[int, dict[int, float]] = {}
        self._first: dict[int, list[float]] = {rank: [] for rank in predicted}
        self._past = _Comparison(MEASURED_SLOW, is_own=True)
        self._plan = _Comparison(SLOW, is_own=False)
        self._plan.expected = {rank: seconds for rank, seconds in predicted.items() if seconds > 0}

    def report(self, report: Report) -> list[Slow | Recovered]:
        """Hears of a rank's step; ranks are compared once all have reported it."""
        self._last[report.rank] = report.step
        self._pending.setdefault(report.step, {})[report.rank] = report.seconds
        complete = max(min(self._last.values()), max(self._last.values()) - _MISSING_STEPS)
        events: list[Slow | Recovered] = []
        for step in sorted(step for step in self._pending if step <= complete):
            events += self._judge(step, self._pending.pop(step))
        return events

    def _judge(self, step: int, seconds: Mapping[int, float]) -> list[Slow | Recovered]:
        self._past.add(seconds)
        self._plan.add(seconds)
        events = self._recovered(step)
        for comparison, other in ((self._past, "its own past"), (self._plan, "the prediction")):
            for rank, factor in comparison.slow().items():
                if rank not in self.slow:
                    self.slow[rank] = Slow(rank, step, factor, other)
                    events.append(self.slow[rank])
        self._learn(seconds)
        return events

    def _recovered(self, step: int) -> list[Slow | Recovered]:
        events: list[Slow | Recovered] = []
        for rank, said in list(self.slow.items()):
            comparison = self._past if said.compared_with == "its own past" else self._plan
            if comparison.factors.get(rank, SLOW) < RECOVERED:
                del self.slow[rank]
                events.append(Recovered(rank, step))
        return events

    def _learn(self, seconds: Mapping[int, float]) -> None:
        """Makes a rank's own past of its first steps."""
        for rank, value in seconds.items():
            first = self._first[rank]
            if len(first) < FIRST_STEPS:
                first.append(value)
                if len(first) == FIRST_STEPS and (past := _middle(first)) > 0:
                    self._past.expected[rank] = past


@dataclass
class _Comparison:
    """The last steps of ranks against what is expected of each.

    Attributes:
        threshold: The factor that is slow.
        is_own: Whether what is expected is a rank's own past: then it must be slower than that, not only than others.
        expected: Seconds by rank.
        factors: By rank, how many times as long as expected its last steps took, relative to the other ranks.
    """

    threshold: float
    is_own: bool
    expected: dict[int, float] = field(default_factory=dict)
    factors: dict[int, float] = field(default_factory=dict)
    _ratios: dict[int, deque[float]] = field(default_factory=dict)
    _slower: dict[int, deque[bool]] = field(default_factory=dict)

    def add(self, seconds: Mapping[int, float]) -> None:
        """Takes the seconds of one step by rank."""
        ratios = {rank: value / self.expected[rank] for rank, value in seconds.items() if rank in self.expected}
        if not ratios:
            return
        common = self._common(ratios.values())
        for rank, ratio in ratios.items():
            self._ratios.setdefault(rank, deque(maxlen=WINDOW_STEPS)).append(ratio)
            self._slower.setdefault(rank, deque(maxlen=WINDOW_STEPS)).append(ratio > RECOVERED * common)
        middles = {rank: _middle(last) for rank, last in self._ratios.items() if len(last) == WINDOW_STEPS}
        if middles:
            common = self._common(middles.values())
            self.factors = {rank: middle / common for rank, middle in middles.items()}

    def slow(self) -> dict[int, float]:
        """Returns the factors of the ranks that are slow."""
        return {
            rank: factor
            for rank, factor in self.factors.items()
            if factor >= self.threshold and sum(self._slower[rank]) >= _SLOW_STEPS
        }

    def _common(self, ratios: Iterable[float]) -> float:
        """Returns the factor of all ranks: where two of three are slow, that of the third counts.

        A rank is never slower than its own past because another has become faster.
        """
        if not self.is_own:
            return max(median_low(ratios), 1e-30)
        ordered = sorted(ratios)
        return max(1.0, ordered[(len(ordered) - 1) // 3])


def _middle(values: Iterable[float]) -> float:
    """Returns the mean of the middle three fifths: steadier than the median, and as deaf to single values."""
    ordered = sorted(values)
    cut = len(ordered) // 5
    return fmean(ordered[cut : len(ordered) - cut])


class Progress:
    """Finds out for whom a job waits that makes no progress.

    Args:
        ranks: All of them.
        step_seconds: The predicted step.
        time: When the job started.
    """

    def __init__(self, ranks: Sequence[int], step_seconds: float, time: float) -> None:
        self._ranks = set(ranks)
        self._step_seconds = step_seconds
        self._last_report = time
        self._reported: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        self._places: dict[int, Place] = {}
        self._gaps: deque[float] = deque(maxlen=FIRST_STEPS)
        self._longest = 0.0

    def report(self, report: Report) -> None:
        """Hears that a rank has ended a step."""
        rank, time = report.rank, report.time
        if rank in self._reported:
            gap = time - self._reported[rank]
            self._gaps.append(gap)
            self._longest = max(self._longest, gap)
        self._reported[rank] = self._heard[rank] = self._last_report = time
        self._places.pop(rank, None)

    def tell(self, place: Place) -> None:
        """Hears where a rank is."""
        self._heard[place.rank] = place.time
        self._places[place.rank] = place

    def end(self, rank: int) -> None:
        """Hears that a rank has ended."""
        self._ranks.discard(rank)

    def hung(self, time: float) -> list[Hung]:
        """Returns the hung ranks: those that say nothing, and those that others wait for and that wait for nobody."""
        seconds = time - self._last_report
        silent = {rank for rank in self._ranks if rank in self._heard and time - self._heard[rank] > SILENT_SECONDS}
        if seconds <= SILENT_SECONDS or silent >= self._ranks:
            return []  # who hears nobody at all is alone
        waiting = self._waiting(silent)
        found = []
        for rank in sorted({each for ranks in waiting.values() for each in ranks} | silent):
            is_silent = rank in silent
            others = tuple(sorted(each for each, ranks in waiting.items() if rank in ranks))
            if is_silent or (rank not in waiting and seconds > self._limit()):
                found.append(Hung(rank, seconds, self._words(rank), is_silent, others))
        return found

    def _waiting(self, silent: set[int]) -> dict[int, set[int]]:
        """Returns, for each rank that waits and says so, the ranks that it waits for, also by way of others."""
        direct = {
            rank: set(place.waits_for) & self._ranks - {rank}
            for rank, place in self._places.items()
            if place.waits_for and rank in self._ranks - silent
        }
        return {rank: _reached(rank, direct) for rank in direct}

    def _limit(self) -> float:
        """Returns after how many seconds without progress a rank that runs is hung."""
        if len(self._reported) < len(self._ranks):
            return math.inf  # it may trace, measure and plan for long before its first step
        step = max(self._step_seconds, median(self._gaps) if self._gaps else 0.0)
        return max(BUSY_SECONDS, HUNG_STEPS * step, LONGER_THAN_EVER * self._longest)

    def _words(self, rank: int) -> str:
        return self._places[rank].words if rank in self._places else "it has not said"


def _reached(start: int, direct: Mapping[int, set[int]]) -> set[int]:
    """Returns all that is reached from a rank over those that wait."""
    reached: set[int] = set()
    following = set(direct[start])
    while following:
        reached |= following
        following = {each for rank in following for each in direct.get(rank, ())} - reached
    return reached
