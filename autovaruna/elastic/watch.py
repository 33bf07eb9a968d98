"""Defines `JobWatch`: what the ranks of one run report through their keepers, which of them hang, and which are slow.

Nothing is to be tuned: how long is too long follows from the longest that ranks have gone without a call so far. An
alarm that was false, as when a script evaluates for the first time, makes the next one wait that much longer. What a
rank computes is compared with its own first steps, and with what the plan predicts, both relative to the other ranks:
it is slow where the middle of ten steps is, and most of them one by one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Any

Place = tuple[str, int]  # a host, and the number of a rank among its own
SLOW = 1.10  # so many times as long as before, or as predicted, is slow
MEASURED_SLOW = 1.08  # what is measured of that over some steps, at the least
RECOVERED = 1.05
"""A slow rank has recovered that takes less than so many times as long, as each of ten windows on end says."""
WINDOW_STEPS = 10
FIRST_STEPS = 20  # the steps that a rank's own past is made of: its first, or as many later ones that are faster
_SETTLING_STEPS, _FASTER = 200, 1.05
"""Until then a rank's past may get faster, by so much: while a job starts, so do other programs on its hosts."""
_SLOW_STEPS = 7
"""So many of a window are slower than `RECOVERED`, each by itself: neither hiccups nor a common change are slowness."""
_MISSING_STEPS = 100  # after so many, a step that some rank has not reported is judged without it


@dataclass(frozen=True)
class Slow:
    """A rank takes so many times as long as ``its own past`` or ``the prediction``, relative to the other ranks."""

    rank: int
    step: int
    factor: float
    compared_with: str


@dataclass(frozen=True)
class Recovered:
    """A slow rank is as fast as it should be again."""

    rank: int
    step: int


class Speeds:
    """Compares ranks with their past, the predicted seconds of a step by rank, and each other.

    `planned_for` is how many times as long as it should a rank takes by what the plan knows, if that is more than 1;
    `slow` has the slow ones, with what was said of them.
    """

    def __init__(self, predicted: Mapping[int, float], planned_for: Mapping[int, float] | None = None) -> None:
        self._planned_for = dict(planned_for or {})
        self.slow = {rank: Slow(rank, -1, factor, "the prediction") for rank, factor in self._planned_for.items()}
        self._last = dict.fromkeys(predicted, -1)
        self._pending: dict[int, dict[int, float]] = {}
        self._recent: dict[int, list[float]] = {rank: [] for rank in predicted}
        self._num_learnt = 0
        self._num_calm: dict[int, int] = {}
        self._past = _Comparison(MEASURED_SLOW, is_own=True)
        self._plan = _Comparison(SLOW, is_own=False)
        self._plan.expected = {rank: seconds for rank, seconds in predicted.items() if seconds > 0}

    def report(self, rank: int, step: int, seconds: float) -> list[Slow | Recovered]:
        """Hears what a rank computed in a step, waits not counted; ranks are compared once all have reported it."""
        self._last[rank] = step
        self._pending.setdefault(step, {})[rank] = seconds
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
                if rank not in self.slow or rank in self._planned_for:
                    self._planned_for.pop(rank, None)
                    self.slow[rank] = Slow(rank, step, factor, other)
                    events.append(self.slow[rank])
        self._learn(seconds)
        return events

    def _recovered(self, step: int) -> list[Slow | Recovered]:
        events: list[Slow | Recovered] = []
        for rank, said in list(self.slow.items()):
            comparison = self._past if said.compared_with == "its own past" else self._plan
            factor, patience = comparison.factors.get(rank, SLOW), WINDOW_STEPS
            if rank in self._planned_for:  # else the others would seem slow beside it
                factor = comparison.beside_others(rank, self._planned_for) * self._planned_for[rank]
                patience = 1
            self._num_calm[rank] = self._num_calm.get(rank, 0) + 1 if factor < RECOVERED else 0
            if self._num_calm[rank] >= patience:
                del self.slow[rank], self._num_calm[rank]
                self._planned_for.pop(rank, None)
                events.append(Recovered(rank, step))
        return events

    def _learn(self, seconds: Mapping[int, float]) -> None:
        """Makes a rank's own past of its first steps, or of later ones where it is faster, beside the slowest third."""
        if self._num_learnt >= _SETTLING_STEPS:
            return
        for rank, value in seconds.items():
            self._recent[rank].append(value)
        if any(len(self._recent[rank]) < FIRST_STEPS for rank in seconds):
            return
        past = self._past.expected
        found = {rank: middle for rank in seconds if (middle := _middle(self._recent[rank])) > 0}
        ratios = sorted((found[rank] / past[rank] for rank in found if rank in past), reverse=True)
        common = min(1.0, ratios[(len(ratios) - 1) // 3]) if ratios else 1.0
        for rank, middle in found.items():
            if middle / common < past.get(rank, math.inf) / _FASTER:
                past[rank] = middle / common
        self._recent = {rank: [] for rank in self._recent}
        self._num_learnt += FIRST_STEPS


@dataclass
class _Comparison:
    """The last steps of ranks against what is expected of each.

    Attributes:
        threshold: The factor that is slow.
        is_own: Whether what is expected is a rank's own past: then it must be slower than that, not only than others.
        factors: By rank, how many times as long as expected its last steps took, relative to the other ranks.
    """

    threshold: float
    is_own: bool
    expected: dict[int, float] = field(default_factory=dict)
    factors: dict[int, float] = field(default_factory=dict)
    _middles: dict[int, float] = field(default_factory=dict)
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
        self._middles = {rank: _middle(last) for rank, last in self._ratios.items() if len(last) == WINDOW_STEPS}
        if self._middles:
            common = self._common(self._middles.values())
            self.factors = {rank: middle / common for rank, middle in self._middles.items()}

    def beside_others(self, rank: int, apart: Collection[int]) -> float:
        """Returns the factor of a rank relative to the ranks but those that are `apart`; infinite: not known yet."""
        others = [middle for other, middle in self._middles.items() if other not in apart]
        return self._middles.get(rank, math.inf) / (self._common(others) if others else 1.0)

    def slow(self) -> dict[int, float]:
        """Returns the factors of the ranks that are slow."""
        return {
            rank: factor
            for rank, factor in self.factors.items()
            if factor >= self.threshold and sum(self._slower[rank]) >= _SLOW_STEPS
        }

    def _common(self, ratios: Iterable[float]) -> float:
        """Returns the factor of all ranks; against their own past, that of the fastest third, 1 or more."""
        if not self.is_own:
            return max(median_low(ratios), 1e-30)
        ordered = sorted(ratios)
        return max(1.0, ordered[(len(ordered) - 1) // 3])


def _middle(values: Iterable[float]) -> float:
    """Returns the mean of the middle three fifths: steadier than the median, and as deaf to single values."""
    ordered = sorted(values)
    cut = len(ordered) // 5
    return fmean(ordered[cut : len(ordered) - cut])


_LEAST_SECONDS = 20.0
_TIMES_LONGEST = 20.0
_LEAST_WORK_SECONDS = 5e-3  # of a step; what takes less varies by more than slow ranks do
_STOPPED_SECONDS = 4.0  # how long a process may be stopped, as by a debugger that comes and goes
_MOST_NAMES = 4


@dataclass(frozen=True)
class Hang:
    """Ranks that stand still: which and where, for how long, and whether it was somebody else than their script."""

    words: str
    seconds: float
    is_from_outside: bool = False


@dataclass
class _ReportedRank:
    """A rank as it was last reported: where, what, and since when it is stopped."""

    host: str
    report: Mapping[str, Any]
    stopped_since: float | None = None
    last_call: int = -1


class JobWatch:
    """The ranks of one run, the attempt.

    Attributes:
        longest_seconds: the longest that ranks went without a call, in this run and earlier ones.
        changes: ranks that have become slow, or as fast as before, which whoever takes them removes.

    Args:
        factors: by rank, how many times as long as it should it takes by what the plan knows; empty: none is slow.
    """

    def __init__(self, attempt: int, longest_seconds: float = 0.0, factors: Sequence[float] = ()) -> None:
        self.attempt = attempt
        self._planned_for = {rank: factor for rank, factor in enumerate(factors) if factor > 1.0}
        self.longest_seconds = longest_seconds
        self.changes: list[Slow | Recovered] = []
        self._speeds: Speeds | None = None
        self._ranks: dict[int, _ReportedRank] = {}
        self._states: dict[str, Mapping[str, Any]] = {}
        self._num_calls = 0
        self._last_change = time.monotonic()

    def take(self, host: str, report: Mapping[str, Any]) -> None:
        """Takes what a keeper has reported."""
        if self._states.get(host) is report or report.get("attempt") != self.attempt:
            return
        now = time.monotonic()
        self._states[host] = report
        for name, its in report["ranks"].items():
            seen = self._ranks.setdefault(int(name), _ReportedRank(host, its))
            seen.host, seen.report = host, its
            seen.stopped_since = (seen.stopped_since or now) if its["state"] == "T" else None
        self._compare([int(name) for name in report["ranks"]])
        num_calls = sum(seen.report["calls"] for seen in self._ranks.values())
        if num_calls != self._num_calls:
            if self.num_steps_here > 1:
                self.longest_seconds = max(self.longest_seconds, now - self._last_change)
            self._num_calls, self._last_change = num_calls, now

    def _compare(self, ranks: Iterable[int]) -> None:
        """Tells the comparison of speeds what ranks have computed since it was last told of them."""
        predicted = next((state["predicted"] for state in self._states.values() if state["predicted"]), None)
        if self._speeds is None:
            if predicted is None or len(self._ranks) < len(predicted) or max(predicted.values()) < _LEAST_WORK_SECONDS:
                return
            self._speeds = Speeds({int(rank): seconds for rank, seconds in predicted.items()}, self._planned_for)
        for rank in ranks:
            seen = self._ranks[rank]
            for call, seconds in seen.report["work"]:
                if call > seen.last_call:
                    seen.last_call = call
                    self.changes += self._speeds.report(rank, call, seconds)

    def place_of(self, rank: int) -> Place:
        """Returns the host of a rank, and its number there."""
        host = self._ranks[rank].host
        return host, sorted(other for other, seen in self._ranks.items() if seen.host == host).index(rank)

    def step_of(self, rank: int) -> int:
        """Returns the number of the newest step that a rank has come to; 0: none in this run."""
        return self._ranks[rank].report["steps"] if rank in self._ranks else 0

    def is_out_of_memory(self, rank: int) -> bool:
        """Says whether the kernel of a rank's host has ended processes in this run because memory was short."""
        host = self._ranks[rank].host if rank in self._ranks else ""
        return bool(self._states.get(host, {}).get("memory_kills"))

    @property
    def num_steps(self) -> int:
        """The number of the newest step that any rank has come to; 0: none."""
        return max((seen.report["steps"] for seen in self._ranks.values()), default=0)

    @property
    def num_steps_here(self) -> int:
        """How many calls each rank has begun in this run, at least."""
        return min((seen.report["calls"] for seen in self._ranks.values()), default=0)

    @property
    def hosts_that_hear(self) -> list[str]:
        """The hosts with ranks that a signal has asked to end."""
        return sorted({seen.host for seen in self._ranks.values() if seen.report["hears_end"]})

    @property
    def holds_any(self) -> bool:
        """Whether the ranks of this run keep their states in memory of hosts."""
        return any(state["newest"] is not None for state in self._states.values())

    @property
    def full_hosts(self) -> list[str]:
        """The hosts that have no room for what their ranks, or others, keep in memory."""
        return sorted(host for host, state in self._states.items() if state["is_full"])

    @property
    def is_kept(self) -> bool:
        """Whether ranks of this run keep their states, or will once they train."""
        return any(seen.report["is_kept"] for seen in self._ranks.values())

    @property
    def can_leave(self) -> bool:
        """Whether the ranks of this run have trained and can end at the next border with all that they have done."""
        reports = [seen.report for seen in self._ranks.values()]
        return not self.full_hosts and any(its["is_kept"] and its["calls"] > its["is_inside"] for its in reports)

    def held_step(self, hosts: Collection[str]) -> int:
        """Returns the newest step that hosts have whole, each of several with a copy of another's; -1: none."""
        states = [self._states.get(host, {"newest": None, "copied": None}) for host in hosts]
        steps = [its["newest"] if len(states) == 1 else its["copied"] and its["copied"][1] for its in states]
        return min((-1 if step is None else int(step) for step in steps), default=-1)

    def hang(self) -> Hang | None:
        """Returns which ranks hang; None: none does."""
        now = time.monotonic()
        stopped = {
            rank: seen
            for rank, seen in self._ranks.items()
            if seen.stopped_since is not None and now - seen.stopped_since > _STOPPED_SECONDS
        }
        if stopped:
            since = min(seen.stopped_since or now for seen in stopped.values())
            return Hang(f"{_named(stopped)} stopped by a signal", now - since, is_from_outside=True)
        silent = now - self._last_change
        if self.num_steps_here < 2 or silent < max(_LEAST_SECONDS, _TIMES_LONGEST * self.longest_seconds):
            return None
        self.longest_seconds = silent
        return Hang(self._words(), silent)

    def words_of_gone(self, ended: Iterable[int]) -> str:
        """Says which rank was the first to go without a word, those aside that are known to have ended; empty: none."""
        gone = {rank: seen for rank, seen in self._ranks.items() if seen.report["gone_seconds"] > 0}
        silent = {rank: seen for rank, seen in gone.items() if rank not in set(ended)}
        if not silent:
            return ""
        first = max(silent, key=lambda rank: float(silent[rank].report["gone_seconds"]))
        return _named({first: silent[first]}) + " gone"

    def _words(self) -> str:
        """Says which ranks the others wait for, and where those are."""
        fewest = min(seen.report["calls"] for seen in self._ranks.values())
        late = {rank: seen for rank, seen in self._ranks.items() if seen.report["calls"] == fewest}
        outside = {rank: seen for rank, seen in late.items() if not seen.report["is_inside"]}
        if outside and len(outside) < len(self._ranks):
            return f"{_named(outside)} in the script, outside of the model; the others wait in it"
        if outside:
            return "all ranks are in the script, outside of the model"
        return f"{_named(late)} inside of the model, in call {fewest}"


def _named(ranks: Mapping[int, _ReportedRank]) -> str:
    names = [f"rank {rank} on {seen.host}" for rank, seen in sorted(ranks.items())]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more + (" is" if len(names) == 1 else " are")
