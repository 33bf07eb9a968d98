"""Finds slow ranks (`Speeds`), and has a plan made anew for them, or their host left out (`SlowRanks`).

What a rank computes is compared with its own first steps, and with what the plan predicts, both relative to the other
ranks: it is slow where the middle of ten steps is, and most of them one by one.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low

from autovaruna.elastic.notices import EventLog

Place = tuple[str, int]  # a host, and the number of a rank among its own
SLOW = 1.10  # so many times as long as before, or as predicted, is slow
MEASURED_SLOW = 1.08  # what is measured of that over some steps, at the least
RECOVERED = 1.05  # a slow rank takes less than so many times as long once it has recovered
WINDOW_STEPS = 10
FIRST_STEPS = 20  # the steps that a rank's own past is made of: its first, or as many later ones that are faster
_PAST_STEPS, _FASTER = 200, 1.05
"""Until then a rank's past may get faster, by so much: while a job starts, so do other programs on its hosts."""
_SLOW_STEPS = 7  # of a window, each slower than `RECOVERED`: neither hiccups nor a common change are slowness
_MISSING_STEPS = 100  # after so many, a step that some rank has not reported is judged without it
OWN_PAST, PREDICTION = "its own past", "the prediction"
SLOW_FILE = "slow_machines.out"  # gets the hosts that are left out, a name a line, as Varuna writes it
_BETWEEN_SECONDS = 120.0  # the least time between two plans that are made anew for the sake of speeds
_SETTLING_SECONDS = 60.0  # after a start nothing is judged: all hosts have more to do than train
_WORTH_SECONDS = 600.0  # within which a restart has to win back what it takes
_LASTING_SECONDS = 10.0  # what is slow for less than a restart takes is not worth one, at the least
_QUIET_SECONDS = 60.0  # how long nothing more is printed of a rank that is slow from time to time; the events have all
LEFT_OUT_SECONDS = 600.0  # after which a host is tried again; doubled each time that it is still slow


@dataclass(frozen=True)
class Slow:
    """A rank takes so many times as long as `OWN_PAST` or `PREDICTION`, relative to the other ranks."""

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
    `slow` has the slow ones.
    """

    def __init__(self, predicted: Mapping[int, float], planned_for: Mapping[int, float] | None = None) -> None:
        self._planned_for = dict(planned_for or {})
        self.slow = {rank: Slow(rank, -1, factor, PREDICTION) for rank, factor in self._planned_for.items()}
        self._last = dict.fromkeys(predicted, -1)
        self._pending: dict[int, dict[int, float]] = {}
        self._recent: dict[int, list[float]] = {rank: [] for rank in predicted}
        self._num_learnt = 0
        self._num_calm: dict[int, int] = {}
        expected = {rank: seconds for rank, seconds in predicted.items() if seconds > 0}
        past, plan = _Comparison(MEASURED_SLOW, is_own=True), _Comparison(SLOW, is_own=False, expected=expected)
        self._comparisons = {OWN_PAST: past, PREDICTION: plan}

    def report(self, rank: int, step: int, seconds: float) -> list[Slow | Recovered]:
        """Records what a rank computed in a step, waits not counted; ranks are compared once all have reported it."""
        self._last[rank] = step
        self._pending.setdefault(step, {})[rank] = seconds
        complete = max(min(self._last.values()), max(self._last.values()) - _MISSING_STEPS)
        due = sorted(step for step in self._pending if step <= complete)
        return [event for step in due for event in self._judge(step, self._pending.pop(step))]

    def _judge(self, step: int, seconds: Mapping[int, float]) -> list[Slow | Recovered]:
        for comparison in self._comparisons.values():
            comparison.add(seconds)
        events: list[Slow | Recovered] = [Recovered(rank, step) for rank in self._pop_recovered()]
        for other, comparison in self._comparisons.items():
            for rank, factor in comparison.slow().items():
                if rank not in self.slow or rank in self._planned_for:
                    self._planned_for.pop(rank, None)
                    self.slow[rank] = Slow(rank, step, factor, other)
                    events.append(self.slow[rank])
        self._learn(seconds)
        return events

    def _pop_recovered(self) -> list[int]:
        recovered = []
        for rank, slow in self.slow.items():
            comparison = self._comparisons[slow.compared_with]
            factor, patience = comparison.factors.get(rank, SLOW), WINDOW_STEPS
            if rank in self._planned_for:  # else the others would seem slow beside it
                factor = comparison.beside_others(rank, self._planned_for) * self._planned_for[rank]
                patience = 1
            self._num_calm[rank] = self._num_calm.get(rank, 0) + 1 if factor < RECOVERED else 0
            if self._num_calm[rank] >= patience:
                recovered.append(rank)
                self._planned_for.pop(rank, None)
        for rank in recovered:
            del self.slow[rank], self._num_calm[rank]
        return recovered

    def _learn(self, seconds: Mapping[int, float]) -> None:
        """Makes a rank's own past of its first steps, or of later ones where it is faster, beside the slowest third."""
        if self._num_learnt >= _PAST_STEPS:
            return
        for rank, value in seconds.items():
            self._recent[rank].append(value)
        if any(len(self._recent[rank]) < FIRST_STEPS for rank in seconds):
            return
        past = self._comparisons[OWN_PAST].expected
        middles = {rank: middle for rank in seconds if (middle := _middle(self._recent[rank])) > 0}
        ratios = sorted((middles[rank] / past[rank] for rank in middles if rank in past), reverse=True)
        common = min(1.0, ratios[(len(ratios) - 1) // 3]) if ratios else 1.0
        for rank, middle in middles.items():
            if middle / common < past.get(rank, math.inf) / _FASTER:
                past[rank] = middle / common
        self._recent = {rank: [] for rank in self._recent}
        self._num_learnt += FIRST_STEPS


@dataclass
class _Comparison:
    """The last steps of ranks against what is expected of each."""

    threshold: float  # the factor that is slow
    is_own: bool  # whether a rank's own past is expected: it must be slower than that, not only than others
    expected: dict[int, float] = field(default_factory=dict)
    factors: dict[int, float] = field(default_factory=dict)  # of the last steps, relative to the other ranks
    _middles: dict[int, float] = field(default_factory=dict)
    _ratios: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW_STEPS)))
    _slower: dict[int, deque[bool]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW_STEPS)))

    def add(self, seconds: Mapping[int, float]) -> None:
        """Adds the seconds of one step by rank."""
        ratios = {rank: value / self.expected[rank] for rank, value in seconds.items() if rank in self.expected}
        if not ratios:
            return
        common = self._common(ratios.values())
        for rank, ratio in ratios.items():
            self._ratios[rank].append(ratio)
            self._slower[rank].append(ratio > RECOVERED * common)
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
        found = {rank: factor for rank, factor in self.factors.items() if factor >= self.threshold}
        return {rank: factor for rank, factor in found.items() if sum(self._slower[rank]) >= _SLOW_STEPS}

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


@dataclass
class _Speed:
    """How many times as long as it should a rank takes, since when, and when that was last printed; 1: as it should."""

    factor: float = 1.0
    own_factor: float = 1.0  # by its own past
    since: float = -math.inf
    last_shown: float = -math.inf
    is_shown: bool = False


class SlowRanks:
    """The slow ranks of a job: planned for, or, if one takes `most` times as long as before, its host is left out."""

    def __init__(self, log: EventLog, most: float) -> None:
        self._log = log
        self._most = most
        self._until: dict[str, float] = {}
        self._cost_seconds = _LASTING_SECONDS  # the longest that a start again took
        self._began = -math.inf
        self._patience: dict[str, float] = {}
        self._has_planned = False
        self._speeds: defaultdict[Place, _Speed] = defaultdict(_Speed)
        self._run: tuple[tuple[str, int], ...] = ()
        self._planned_for: defaultdict[tuple[tuple[str, int], ...], dict[Place, float]] = defaultdict(dict)
        self._last_plan = -math.inf

    @property
    def wants_plan(self) -> bool:
        """Whether other ranks, of several, are slow for long than the plan knows, which was not made just now."""
        if sum(count for _, count in self._run) < 2:
            return False
        now = time.monotonic()
        if now < max(self._began + _SETTLING_SECONDS, self._last_plan + _BETWEEN_SECONDS):
            return False
        others = [self._speeds[place] for place in self._relevant().keys() ^ self._planned_for[self._run]]
        return any(map(self._lasts, others)) and self._gain() * _WORTH_SECONDS > self._cost_seconds

    def record_start(self, seconds: float) -> None:
        """Records that a run has come to its first step, so long after the one before it had ended."""
        self._began, self._cost_seconds = time.monotonic(), max(self._cost_seconds, seconds)

    def _lasts(self, speed: _Speed) -> bool:
        return time.monotonic() > speed.since + self._cost_seconds

    def _gain(self) -> float:
        """Returns which share of a step a plan would save that gives each rank what it does in the same time."""
        places = [(host, number) for host, count in self._run for number in range(count)]
        takes = [self._speeds[place].factor for place in places]
        known = [self._planned_for[self._run].get(place, 1.0) for place in places]
        now = max(its / planned for its, planned in zip(takes, known, strict=True)) / sum(1 / each for each in known)
        return 1.0 - 1.0 / sum(1 / each for each in takes) / now

    def _leave_one_out(self) -> None:
        """Leaves one host out, that one of its ranks has been too slow for longer than a start takes; then no other."""
        if self._until or time.monotonic() < self._began + _SETTLING_SECONDS:
            return
        hosts = dict(self._run)
        slow = {
            place[0]: speed.own_factor
            for place, speed in self._speeds.items()
            if speed.own_factor >= self._most and self._lasts(speed) and place[0] in hosts
        }
        if slow:
            host = max(slow, key=slow.__getitem__)
            seconds = self._patience.get(host, LEFT_OUT_SECONDS)
            self._patience[host], self._until[host] = 2 * seconds, time.monotonic() + seconds
            self._write()

    def record(self, changes: Iterable[tuple[Place, Slow | Recovered]]) -> None:
        """Records which ranks have become slow, or are so no more."""
        for place, change in changes:
            if isinstance(change, Slow):
                self._record_slow(change, place)
            elif (speed := self._speeds[place]).factor > 1.0:
                text = f"rank {change.rank} on {place[0]} is as fast as before"
                self._log.record("recovered", text, is_shown=speed.is_shown, host=place[0])
                speed.factor, speed.own_factor, speed.since, speed.is_shown = 1.0, 1.0, time.monotonic(), False

    def _record_slow(self, slow: Slow, place: Place) -> None:
        host, _ = place
        is_by_plan = slow.compared_with == PREDICTION
        if is_by_plan and self._has_planned:  # a plan that was made anew has measured the ranks by itself
            return
        speed, now = self._speeds[place], time.monotonic()
        if is_shown := now > speed.last_shown + _QUIET_SECONDS:
            speed.last_shown, speed.is_shown = now, True
        text = f"rank {slow.rank} on {host} takes {slow.factor:.2f} times as long as {slow.compared_with}"
        details = {"host": host, "rank": slow.rank, "factor": slow.factor, "compared_with": slow.compared_with}
        self._log.record("slow", text, is_shown=is_shown, **details)
        planned_for = self._planned_for[self._run]
        speed.factor = slow.factor * (speed.factor if place in planned_for else 1.0)
        speed.since = now
        planned_for.pop(place, None)
        speed.own_factor = speed.own_factor if is_by_plan else slow.factor

    def begin(self, hosts: Mapping[str, int]) -> bool:
        """Says whether the plan for the hosts of a run that begins is to be made anew; then that is done."""
        self._run = tuple(hosts.items())
        is_wanted = self.wants_plan
        if is_wanted:
            self._has_planned, self._last_plan = True, time.monotonic()
            self._planned_for[self._run] = self._relevant()
        return is_wanted

    def _relevant(self) -> dict[Place, float]:
        """Returns the ranks of the run that are slow for long, or as the plan knows, on hosts that are to stay."""
        counts = {host: count for host, count in self._run if host not in self._until}
        return {
            place: speed.factor
            for place, speed in self._speeds.items()
            if speed.factor > 1.0 and place[1] < counts.get(place[0], 0)
            if self._lasts(speed) or place in self._planned_for[self._run]
        }

    def factors(self) -> tuple[float, ...]:
        """Returns how many times as long as it should each rank of the run takes; the ranks are host by host."""
        used = self._relevant()
        return tuple(used.get((host, place), 1.0) for host, count in self._run for place in range(count))

    def leaves_out(self, host: str) -> bool:
        """Says whether a host is left out now."""
        if host in self._until and time.monotonic() > self._until[host]:
            for place, speed in self._speeds.items():
                speed.factor = 1.0 if place[0] == host else speed.factor
            self.forgive(host)
        self._leave_one_out()
        return host in self._until

    def forgive(self, host: str) -> None:
        """Lets a host that was left out be used again."""
        for place, speed in self._speeds.items():
            speed.own_factor = 1.0 if place[0] == host else speed.own_factor
        if self._until.pop(host, None) is not None:
            self._write()

    def _write(self) -> None:
        with suppress(OSError):
            Path(SLOW_FILE).write_text("".join(f"{host}\n" for host in sorted(self._until)), encoding="utf-8")
