"""Defines `Speeds`: which ranks are slow.

What a rank computes is compared with its own first steps, and with what the plan predicts, both relative to the other
ranks: it is slow where the middle of ten steps is, and most of them one by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median_low

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
