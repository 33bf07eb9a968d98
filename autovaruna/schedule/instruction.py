"""Defines `Instruction`, the unit of a schedule, and prints schedules as grids of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What an instruction does; the value is its letter in print (``2F0`` is stage 2, forward, micro-batch 0)."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    WEIGHT = "W"

    __hash__ = str.__hash__
    """That of `Enum` is a function of Python's, and every instruction of a step is looked up by its kind."""


FORWARD, RECOMPUTE, BACKWARD, WEIGHT = Kind
"""Where each instruction of a step asks for them: as an attribute of an `Enum` they take ten times as long."""


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One act: a kind of work, at a stage, for a micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Schedule = tuple[tuple[Instruction, ...], ...]


MOST_CELLS = 8


def grid(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Returns the schedule as text: of each rank, some instructions around the position that is to be ``>marked<``.

    The end of the row is a position too.
    """
    rows, marks = [], marks or {}
    for rank, row in enumerate(schedule):
        cells, mark = [*map(str, row), "end"], marks.get(rank, 0)
        if rank in marks:
            cells[mark] = f">{cells[mark]}<"
        first, last = max(0, mark - MOST_CELLS), mark + MOST_CELLS + 1
        shown = ["..."] * (first > 0) + cells[first:last] + ["..."] * (last < len(cells))
        rows.append(f"rank {rank} | {' '.join(shown)}")
    return "\n".join(rows)
