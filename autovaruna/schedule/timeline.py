"""Draws a simulated step as text."""

from __future__ import annotations

from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.simulation import Event, LostTime, Simulation

FILL = {Kind.FORWARD: ">", Kind.RECOMPUTE: "o", Kind.BACKWARD: "<", Kind.WEIGHT: "w"}
MEANINGS = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}


def draw(simulation: Simulation, slot_seconds: float) -> str:
    """Returns a drawing with one cell for each slot of time, for steps whose instructions all take one slot."""
    cells = [["."] * round(simulation.step_seconds / slot_seconds) for _ in simulation.acts]
    for event in simulation.events:
        cells[event.rank][round(event.start_seconds / slot_seconds)] = str(event.instruction)
    width = max(len(cell) for row in cells for cell in row)
    rows = [" ".join(cell.center(width) for cell in row) for row in cells]
    return "\n".join(f"rank {rank} | {row}".rstrip() for rank, row in enumerate(rows))


_NARROWEST, _WIDEST = 50, 100
"""Characters for a step where lines have to fit."""


def render(simulation: Simulation, width: int = 100, *, columns: int = 0) -> str:
    """Returns a timeline: one row a rank, time to the right, and what share of the step the rank lost to what.

    Args:
        simulation: the step.
        width: characters for the whole step.
        columns: characters for a line, in place of `width`; where they are few the shares are left out.
    """
    shares = [f" {_shares(lost, simulation.step_seconds)}" for lost in simulation.lost]
    margin = len(f"rank {len(shares) - 1}")
    if columns:
        room = columns - margin - len(" ||")
        width = min(room - max(map(len, shares)), _WIDEST)
        if width < _NARROWEST:
            width, shares = max(min(room, _WIDEST), 1), [""] * len(shares)
    lines = [
        f"{f'rank {rank}':<{margin}} |{''.join(row)}|{share}"
        for rank, (row, share) in enumerate(zip(_rows(simulation, width), shares, strict=True))
    ]
    return "\n".join([*lines, f"step {simulation.step_seconds:.6g} s    {_legend(simulation)}"])


def _legend(simulation: Simulation) -> str:
    is_split = any(act[3] is Kind.WEIGHT for acts in simulation.acts for act in acts)
    meanings = MEANINGS | ({Kind.WEIGHT: "weight gradients"} if is_split else {})
    return "  ".join(f"{FILL[kind]} {meaning}" for kind, meaning in meanings.items()) + "  + all-reduce  . idle"


def _rows(simulation: Simulation, width: int) -> list[list[str]]:
    columns = width / simulation.step_seconds if simulation.step_seconds > 0 else 0.0
    rows = [["."] * width for _ in simulation.acts]
    for reduction in simulation.reductions:
        for rank in reduction.ranks:
            _paint(rows[rank], reduction.start_seconds * columns, reduction.end_seconds * columns, "+")
    for event in simulation.events:
        _paint_event(rows[event.rank], event, columns)
    return rows


def _paint_event(row: list[str], event: Event, columns: float) -> None:
    _paint(
        row,
        event.start_seconds * columns,
        event.end_seconds * columns,
        FILL[event.instruction.kind],
        str(event.instruction),
    )


def _paint(row: list[str], start: float, end: float, fill: str, label: str = "") -> None:
    """Fills the columns of a span, behind its label if that leaves room for one fill character."""
    first, last = round(start), round(end)
    text = label if len(label) < last - first else ""
    row[first:last] = text.ljust(last - first, fill)


def _shares(lost: LostTime, step_seconds: float) -> str:
    parts = {
        "work": lost.work_seconds,
        "bubble": lost.bubble_seconds,
        "imbalance": lost.imbalance_seconds,
        "messages": lost.message_seconds,
        "all-reduce": lost.reduce_seconds,
        "overhead": lost.overhead_seconds,
        "optimizer": lost.optimizer_seconds,
    }
    return "  ".join(f"{name} {seconds / step_seconds:.0%}" for name, seconds in parts.items() if seconds > 0)
