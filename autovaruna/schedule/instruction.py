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
    """Returns the schedule as text, with places marked.

    Args:
        marks: for some ranks, the position of the instruction to mark ``>like this<``; a marked row is cut down to
            the cells around it. The end of the row is a position too.
    """
    marks = marks or {}
    return "\n".join(_row(schedule, rank, marks.get(rank)) for rank in range(len(schedule)))


def _row(schedule: Schedule, rank: int, mark: int | None) -> str:
    cells = [str(instruction) for instruction in schedule[rank]] + ["end"]
    if mark is not None:
        cells[mark] = f">{cells[mark]}<"
    first = max(0, (mark or 0) - MOST_CELLS)
    last = (mark or 0) + MOST_CELLS + 1
    row = ["..."] * (first > 0) + cells[first:last] + ["..."] * (last < len(cells))
    return f"rank {rank} | " + " ".join(row)
