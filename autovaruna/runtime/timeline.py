"""Writes what ran when on all ranks to a file that trace viewers read, and says in the log where a step's time went."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from autovaruna.errors import ConfigError
from autovaruna.ranks.world import World, on_all
from autovaruna.schedule.pipeline import Edge, Instruction, Kind
from autovaruna.schedule.simulation import Simulation, StepSeconds

logger = logging.getLogger(__name__)
_MEASURED, _PREDICTED = 0, 1
_SHORT_WAIT_SECONDS = 5e-6
_STEPS_TOGETHER = ((32, 1), (256, 8), (math.inf, 64))
"""Up to which step how many are written together."""
_TAG = 1 << 17
_CLOCK_TAG, _NUM_TIMES = (1 << 20) - 2, 10

Span = tuple[str, float, float, float]
"""An instruction; when it began, when it had what it waited for, and when it ended, on the clock of rank 0."""
Ends = tuple[float, float]
"""When a rank's last instruction ended, and when its step did."""
Step = tuple[list[Span], Ends]
Recorded = tuple[Instruction, float, float, float]
"""An instruction, when it began and ended, and how long it waited meanwhile."""
Rows = list[dict[str, Any]]


def account(
    spans: Sequence[Sequence[Span]], ends: Sequence[Ends], awaited: Mapping[str, Sequence[str]]
) -> list[StepSeconds]:
    """Returns where the seconds of a step went on each rank.

    `awaited` has, for each instruction, those whose messages it waits for.
    """
    sent = {name: end for row in spans for name, _, _, end in row}
    start = min((row[0][1] for row in spans if row), default=0.0)
    step = max((end for _, end in ends), default=start) - start
    work = [sum(end - ready for _, _, ready, end in row) for row in spans]
    lost = []
    for row, (last, end), own in zip(spans, ends, work, strict=True):
        messages = 0.0
        for name, begin, ready, _ in row:
            left = max((sent[other] for other in awaited.get(name, ()) if other in sent), default=ready)
            messages += max(0.0, ready - max(begin, left))
        overhead = sum(later[1] - earlier[3] for earlier, later in pairwise(row))
        sums = max(0.0, end - last) if row else 0.0
        lost.append(StepSeconds.of_instructions(step, max(work) - own, own, messages, sums, overhead, 0.0))
    return lost


def table(predicted_seconds: float, lost: Sequence[StepSeconds]) -> str:
    """Returns the account as text: a line for each rank, in per cent of the step."""
    step = lost[0].step
    of_ranks = [{name: seconds for name, seconds in each.parts.items() if name != "optimizer"} for each in lost]
    lines = [f"{1e3 * step:.2f} ms, predicted {1e3 * predicted_seconds:.2f} ms", "rank  " + "  ".join(of_ranks[0])]
    for rank, parts in enumerate(of_ranks):
        cells = (f"{seconds / step if step else 0.0:.1%}".rjust(len(name)) for name, seconds in parts.items())
        lines.append(f"{rank:>4}  " + "  ".join(cells))
    return "\n".join(lines)


def head(num_ranks: int) -> Rows:
    rows: Rows = []
    for process, name in ((_MEASURED, "measured"), (_PREDICTED, "predicted")):
        rows.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for rank in range(num_ranks):
            place = {"pid": process, "tid": rank}
            rows.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}})
    return rows


def measured(rank: int, steps: Mapping[int, Step]) -> Rows:
    """Returns what a rank has done in some steps, by their numbers."""
    rows: Rows = []
    for number, (spans, (last, end)) in steps.items():
        for name, begin, ready, done in spans:
            rows.append(_row(_MEASURED, rank, name, ready, done, number))
            if ready - begin > _SHORT_WAIT_SECONDS:
                rows.append(_row(_MEASURED, rank, "wait", begin, ready, number))
        if spans:
            rows.append(_row(_MEASURED, rank, "all-reduce, loss", last, end, number))
    return rows


def beside(predicted: Simulation, start: float, number: int) -> Rows:
    """Returns the predicted step, from the begin of a measured one on."""
    rows: Rows = []
    for event in predicted.events:
        begin, done = start + event.start_seconds, start + event.end_seconds
        rows.append(_row(_PREDICTED, event.rank, str(event.instruction), begin, done, number))
    for reduction in predicted.reductions:
        begin, done = start + reduction.start_seconds, start + reduction.end_seconds
        rows += [_row(_PREDICTED, rank, "all-reduce", begin, done, number) for rank in reduction.ranks]
    return rows


def arrows(step: Sequence[Step], awaited: Mapping[str, Sequence[str]], number: int) -> Rows:
    """Returns an arrow for each message between ranks."""
    places = {name: (rank, ready, done) for rank, (spans, _) in enumerate(step) for name, _, ready, done in spans}
    rows: Rows = []
    for name, senders in awaited.items():
        for sender in senders:
            if name in places and sender in places and places[name][0] != places[sender][0]:
                (source, _, done), (destination, ready, _) = places[sender], places[name]
                arrow = {"name": "message", "cat": "message", "id": f"{number}/{sender}/{name}", "pid": _MEASURED}
                left = 1e6 * min(done, ready)  # it leaves a little before its instruction ends
                rows.append({"ph": "s", **arrow, "tid": source, "ts": round(left, 3)})
                rows.append({"ph": "f", **arrow, "tid": destination, "ts": round(1e6 * ready, 3), "bp": "e"})
    return rows


def _row(process: int, rank: int, name: str, begin: float, end: float, step: int) -> dict[str, Any]:
    times = {"ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": rank, **times, "args": {"step": step}}


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + ",\n" for row in rows)


class EventTrace:
    """Collects what all ranks did after each step, later after every few, and appends it to a file on rank 0.

    The file is a JSON array that is left open at its end, which trace viewers accept; so a run that is killed leaves
    a trace of the steps before. Of steps that are written together only one has predicted rows and arrows: these take
    most of the time. After steps 2, 4, 8, ... a table in the log says where the time of the step went.

    Attributes:
        recorded: what has run in this step, by readings of `perf_counter`; only later is anything made of it.
        num_steps_left: how many are to be written yet.
        on_account: called on rank 0 with the number of a step, its predicted seconds, and where they went on each rank.

    Raises:
        ConfigError: the file cannot be written, when training begins; the same kind on every rank. Later, training goes
            on without the rest of the trace.
    """

    def __init__(self, path: str, world: World, predicted: Simulation, edges: Sequence[Edge]) -> None:
        self._path, self._world, self._predicted = Path(path), world, predicted
        self._num_steps, self._is_broken, self.num_steps_left = 0, False, math.inf
        self.on_account: Callable[[int, float, Sequence[StepSeconds]], None] | None = None
        on_all(world, self._begin, "starting the trace")
        self._offset = offset_to_first(world)
        self.recorded: list[Recorded] = []
        self._ended: list[tuple[list[Recorded], float]] = []
        self._awaited = awaited_by(predicted, edges) if world.rank == 0 else {}

    def _begin(self) -> None:
        if self._world.rank == 0:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text("[\n" + _lines(head(len(self._predicted.acts))), encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"trace_events_file: {self._path} cannot be written ({error.strerror}); name a file that can be, "
                    "or leave out trace_events"
                ) from error

    def write_step(self) -> None:
        """Ends a step. If it is time to, hands what was recorded to rank 0, which waits for all and appends it."""
        self._ended.append((self.recorded, perf_counter()))
        self.recorded = []
        self._num_steps += 1
        self.num_steps_left -= 1
        if self._num_steps % next(num for last, num in _STEPS_TOGETHER if self._num_steps <= last):
            return
        world, whole = self._world, self._num_steps - len(self._ended) + 1
        steps = {number: self._step(*ended) for number, ended in enumerate(self._ended, whole)}
        self._ended = []
        more = {number: step for number, step in steps.items() if number == whole or _is_reported(number)}
        own = _lines(measured(world.rank, steps)), more
        if world.rank != 0:
            world.send_object(own, 0, _TAG)
            return
        parts = [own, *(world.receive_object(rank, _TAG) for rank in range(1, world.num_ranks))]
        if not self._is_broken:
            try:
                self._append(parts, whole)
            except OSError as error:
                self._is_broken = True
                logger.warning("the trace ends here: %s cannot be written (%s)", self._path, error.strerror)

    def _step(self, recorded: Sequence[Recorded], end: float) -> Step:
        offset = self._offset
        spans = [
            (str(instruction), begin + offset, begin + offset + waited, done + offset)
            for instruction, begin, done, waited in recorded
        ]
        return spans, (spans[-1][3] if spans else 0.0, end + offset)

    def _append(self, parts: Sequence[tuple[str, dict[int, Step]]], whole: int) -> None:
        """Appends the rows of all ranks, and says more of the steps that they give in whole."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(rows for rows, _ in parts)
            for number in parts[0][1]:
                step = [steps[number] for _, steps in parts]
                if number == whole:
                    start = min((spans[0][1] for spans, _ in step if spans), default=0.0)
                    file.write(_lines(beside(self._predicted, start, number)))
                    file.write(_lines(arrows(step, self._awaited, number)))
                if _is_reported(number):
                    lost = account([spans for spans, _ in step], [ends for _, ends in step], self._awaited)
                    predicted = self._predicted.step_seconds - max(self._predicted.optimizer_seconds, default=0.0)
                    logger.info("instructions of step %d: %s", number, table(predicted, lost))
                    if self.on_account is not None:
                        self.on_account(number, predicted, lost)


def offset_to_first(world: World) -> float:
    """Returns the seconds to add to this rank's `perf_counter` to get that of rank 0. Collective.

    Rank 0 answers each rank's messages with its own clock. Of several, the fastest answer counts: what its way there
    and its way back can differ by bounds the error (Cristian, "Probabilistic clock synchronization", 1989).
    """
    clock = torch.empty(1, dtype=torch.float64, device="cpu")
    answers = []
    for rank in range(1, world.num_ranks):
        for _ in range(_NUM_TIMES if world.rank in (0, rank) else 0):
            if world.rank == 0:
                world.receive([clock], rank, _CLOCK_TAG).wait()
                world.send([clock.fill_(perf_counter())], rank, _CLOCK_TAG).wait()
            else:
                begin = perf_counter()
                world.send([clock], 0, _CLOCK_TAG).wait()
                world.receive([clock], 0, _CLOCK_TAG).wait()
                end = perf_counter()
                answers.append((end - begin, clock.item() - (begin + end) / 2))
    return min(answers)[1] if answers else 0.0


def _is_reported(number: int) -> bool:
    return number > 1 and number & (number - 1) == 0


def awaited_by(predicted: Simulation, edges: Sequence[Edge]) -> dict[str, list[str]]:
    """Returns, for each instruction that waits for messages, the instructions that send them."""
    awaited: dict[str, list[str]] = {}
    for step in [step for row in predicted.schedule for step in row if step.kind in (Kind.FORWARD, Kind.BACKWARD)]:
        if step.kind is Kind.FORWARD:
            senders = [edge.source for edge in edges if edge.destination == step.stage]
        else:
            senders = [edge.destination for edge in edges if edge.source == step.stage and edge.needs_gradient]
        if senders:
            awaited[str(step)] = [str(Instruction(stage, step.kind, step.micro_batch)) for stage in senders]
    return awaited
