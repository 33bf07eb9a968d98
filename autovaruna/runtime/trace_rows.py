"""Writes the rows of a Chrome trace: lines of JSON, each with a comma at its end.

The rows of a rank are made on that rank, so that they take as long whatever the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from autovaruna.runtime.recorder import Step
from autovaruna.schedule import Simulation

_MEASURED, _PREDICTED = 0, 1
_SHORT_WAIT_SECONDS = 5e-6


def head(predicted: Simulation) -> list[str]:
    """Returns the lines that name the rows."""
    rows = []
    for process, name in ((_MEASURED, "measured"), (_PREDICTED, "predicted")):
        rows.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for rank in range(len(predicted.acts)):
            rows.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            )
    return [json.dumps(row) + ",\n" for row in rows]


def measured(rank: int, steps: Mapping[int, Step]) -> str:
    """Returns the lines of what a rank has done in some steps, by their numbers."""
    rows: list[str] = []
    for number, (spans, (last, end)) in steps.items():
        for name, begin, ready, done in spans:
            rows.append(_row(_MEASURED, rank, name, ready, done, number))
            if ready - begin > _SHORT_WAIT_SECONDS:
                rows.append(_row(_MEASURED, rank, "wait", begin, ready, number))
        if spans:
            rows.append(_row(_MEASURED, rank, "all-reduce, loss", last, end, number))
    return "".join(rows)


def beside(predicted: Simulation, start: float, number: int) -> list[str]:
    """Returns the lines of the predicted step, from the begin of a measured one on."""
    rows: list[str] = []
    for event in predicted.events:
        begin, done = start + event.start_seconds, start + event.end_seconds
        rows.append(_row(_PREDICTED, event.rank, str(event.instruction), begin, done, number))
    for reduction in predicted.reductions:
        begin, done = start + reduction.start_seconds, start + reduction.end_seconds
        rows += [_row(_PREDICTED, rank, "all-reduce", begin, done, number) for rank in reduction.ranks]
    return rows


def arrows(step: Sequence[Step], awaited: Mapping[str, Sequence[str]], number: int) -> list[str]:
    """Returns the lines of an arrow for each message between ranks."""
    places = {name: (rank, ready, done) for rank, (spans, _) in enumerate(step) for name, _, ready, done in spans}
    rows = []
    for name, senders in awaited.items():
        for sender in senders:
            if name in places and sender in places and places[name][0] != places[sender][0]:
                arrow = f"{number}/{sender}/{name}"
                left = min(places[sender][2], places[name][1])  # it leaves a little before its instruction ends
                rows.append(_arrow("s", places[sender][0], left, arrow))
                rows.append(_arrow("f", places[name][0], places[name][1], arrow))
    return rows


def _row(process: int, rank: int, name: str, begin: float, end: float, step: int) -> str:
    return (
        f'{{"ph":"X","name":"{name}","pid":{process},"tid":{rank},"ts":{begin * 1e6:.3f},'
        f'"dur":{(end - begin) * 1e6:.3f},"args":{{"step":{step}}}}},\n'
    )


def _arrow(phase: str, rank: int, at: float, name: str) -> str:
    binding = ',"bp":"e"' if phase == "f" else ""
    return (
        f'{{"ph":"{phase}","name":"message","cat":"message","id":"{name}","pid":{_MEASURED},"tid":{rank},'
        f'"ts":{at * 1e6:.3f}{binding}}},\n'
    )
