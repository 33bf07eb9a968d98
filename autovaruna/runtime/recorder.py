"""Records when the instructions of this rank ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from autovaruna.runtime.lost import Ends, Span
from autovaruna.schedule.instruction import Instruction

Step = tuple[list[Span], Ends]
Noted = tuple[Instruction, float, float, float]
"""An instruction, when it began and ended, and how long it waited meanwhile."""


@dataclass
class Recorder:
    """Notes the begin and end of instructions on this rank, and of steps, by readings of `perf_counter`.

    Args:
        offset: What to add to this rank's clock to get that of rank 0.
    """

    offset: float = 0.0
    noted: list[Noted] = field(default_factory=list)
    ended: list[tuple[list[Noted], float]] = field(default_factory=list)

    def end_step(self) -> None:
        """Notes that a step has ended."""
        self.ended.append((self.noted, perf_counter()))
        self.noted = []

    def take(self) -> list[Step]:
        """Returns the steps that have ended since the last time; only now is anything made of what was noted."""
        ended, self.ended = self.ended, []
        return [self._step(noted, end) for noted, end in ended]

    def _step(self, noted: Sequence[Noted], end: float) -> Step:
        offset = self.offset
        spans = [
            (str(instruction), begin + offset, begin + offset + waited, done + offset)
            for instruction, begin, done, waited in noted
        ]
        return spans, (spans[-1][3] if spans else 0.0, end + offset)
