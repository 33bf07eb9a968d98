"""Records when each instruction ran, and writes one Chrome trace of all ranks with the predicted rows beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from autovaruna.runtime.world import World
from autovaruna.schedule import Event, Instruction

Span = tuple[str, float, float]
"""An instruction, and the seconds of its begin and end on the common clock."""

_MEASURED, _PREDICTED = 0, 1


@dataclass
class Recorder:
    """Notes the begin and end of instructions on this rank; the clock of every rank starts at a common barrier."""

    origin: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def note(self, instruction: Instruction, begin: float, end: float) -> None:
        """Notes an instruction; `begin` and `end` are readings of `perf_counter`."""
        self.spans.append((str(instruction), begin - self.origin, end - self.origin))


class EventTrace:
    """Collects the spans of all ranks after each step, and appends them to a file on rank 0.

    The file is a JSON array that is left open at its end, which trace viewers accept; so a run that is killed leaves
    a trace of all steps before.

    Args:
        path: The file.
        world: The ranks.
        predicted: The simulated step.
    """

    def __init__(self, path: str, world: World, predicted: Sequence[Event]) -> None:
        self._path = Path(path)
        self._world = world
        self._predicted = predicted
        world.barrier("starting the trace")
        self.recorder = Recorder(perf_counter())
        if world.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            names = [_process_name(_MEASURED, "measured"), _process_name(_PREDICTED, "predicted")]
            self._path.write_text("[\n" + "".join(json.dumps(name) + ",\n" for name in names), encoding="utf-8")

    def write_step(self) -> None:
        """Appends what was recorded since the last time. Collective."""
        spans, self.recorder.spans = self.recorder.spans, []
        known = self._world.gather_objects(spans, "writing the trace")
        if self._world.rank != 0:
            return
        start = min((begin for each in known for _, begin, _ in each), default=0.0)
        rows = [_row(_MEASURED, rank, span) for rank, each in enumerate(known) for span in each]
        rows += [
            _row(
                _PREDICTED, event.rank, (str(event.instruction), start + event.start_seconds, start + event.end_seconds)
            )
            for event in self._predicted
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + ",\n" for row in rows)


def _process_name(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _row(process: int, rank: int, span: Span) -> dict[str, Any]:
    name, begin, end = span
    return {"ph": "X", "name": name, "pid": process, "tid": rank, "ts": begin * 1e6, "dur": (end - begin) * 1e6}
