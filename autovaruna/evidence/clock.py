"""Says in which steps a run looks whether it computes what it should: often at first, then for a share of its time."""

from __future__ import annotations

import math
from collections.abc import Sequence

SHARE = 0.01  # of the time of a run
_FIRST = (1, 2, 3, 5, 9, 17, 33, 65)
_EVERY, _IN_ADVANCE = 100, 1000  # steps


class Clock:
    """Counts steps that train, on all ranks alike: what decides is what all ranks have heard of each other.

    Args:
        share: Of the time of a run, for the first thousand steps in advance.
        step_seconds: What a step is expected to take.
    """

    def __init__(self, share: float, step_seconds: float) -> None:
        self.num_steps = self.num_looks = 0
        self._share, self._step_seconds, self._spent = share, step_seconds, 0.0
        self._due, self._seen = 1, set[str]()

    def count(self) -> None:
        self.num_steps += 1

    def is_due(self, key: str) -> bool:
        """Whether a look is due at this step; always at the first one of a kind."""
        return self.num_steps >= self._due or key not in self._seen

    def record(self, key: str, spent: Sequence[float], step_seconds: float) -> None:
        """Records a look, the seconds that it took each rank, and what a step takes now (zero: not known yet)."""
        self._seen.add(key)
        self.num_looks += 1
        longest = max(spent)
        self._spent += longest
        self._step_seconds = step_seconds or self._step_seconds
        usual = next((step for step in _FIRST if step > self.num_steps), self.num_steps + _EVERY)
        num_paid = math.ceil((self._spent + longest) / max(self._share * self._step_seconds, 1e-9))
        self._due = max(usual, num_paid if num_paid > _IN_ADVANCE else 0)
