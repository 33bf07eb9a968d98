"""Prints a schedule as a grid: one row a rank, one cell an instruction."""

from __future__ import annotations

from collections.abc import Mapping

from autovaruna.schedule.instruction import Schedule

MOST_CELLS = 8


def grid(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Returns the schedule as text, with places marked.

    Args:
        schedule: the instructions of each rank.
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
