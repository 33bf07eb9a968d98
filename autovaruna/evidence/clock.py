"""Says in which steps a run looks whether it computes what it should: often at first, then for a share of its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

SHARE = 0.01  # of the time of a run
_FIRST = (1, 2, 3, 5, 9, 17, 33, 65)
_SURE = 5  # the step up to which the first ones are looked at, whatever that takes
_EVERY, _IN_ADVANCE = 100, 1000  # steps
_MOST_FIRST = 3  # steps of one kind that are looked at as its first, while none of them goes backward


class Clock:
    """Counts steps that train, on all ranks alike: what decides is what all ranks have heard of each other.

    The share is that of a thousand steps in advance, and of calls that trace. Steps 1, 2, 3 and 5 are looked at
    whatever that takes. What first looks at a kind of steps take is a part of such calls.

    Args:
        share: Of the time of a run.
        step_seconds: What a step is expected to take.
    """

    def __init__(self, share: float, step_seconds: float) -> None:
        self.num_steps = self.num_looks = 0
        self._share, self._step_seconds, self._spent = share, step_seconds, 0.0
        self._due, self._seen, self._begun = 1, set[str](), Counter[str]()

    def is_due(self, *kinds: str) -> bool:
        """Whether a look is due in the step that comes; always in the first one of a kind."""
        return self.num_steps + 1 >= self._due or any(map(self.is_new, kinds))

    def begin(self, *kinds: str, trains: bool = True) -> bool:
        """Counts a step of some kinds; says whether a look is due in it: if it does not train, in the first one."""
        is_due = self.is_due(*kinds) if trains else any(map(self.is_new, kinds))
        self.num_steps += trains
        if is_due:
            self._begun.update(kinds)
        if is_due and trains:
            self._due = next((step for step in _FIRST if step > self.num_steps), self.num_steps + _EVERY)
        return is_due

    def record(self, *kinds: str, seconds: Sequence[float], step_seconds: float, trace_seconds: float) -> None:
        """Records a look: what it took each rank, what a step takes now (zero: not known yet), and what traces took."""
        self._spent += (max(seconds) if self._seen.issuperset(kinds) else 0.0) - self._share * trace_seconds
        self._seen.update(kinds)
        self.num_looks += 1
        self._step_seconds = step_seconds or self._step_seconds
        if self._step_seconds:
            num_paid = math.ceil((self._spent + max(seconds)) / max(self._share * self._step_seconds, 1e-9))
            is_spent = self.num_steps >= _SURE and num_paid > _IN_ADVANCE
            self._due = max(self._due, num_paid if is_spent else 0)

    def is_new(self, key: str) -> bool:
        """Whether no step of a kind has been looked at, and some have begun at most."""
        return key not in self._seen and self._begun[key] < _MOST_FIRST
