"""Records when each instruction ran, and writes one Chrome trace of all ranks with the predicted rows beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from autovaruna.errors import ConfigError
from autovaruna.runtime.lost import Ends, Span, account, table
from autovaruna.runtime.worlds.clock import offset_to_first
from autovaruna.runtime.worlds.on_all import on_all
from autovaruna.runtime.worlds.world import World
from autovaruna.schedule import Simulation
from autovaruna.schedule.instruction import Instruction, Kind
from autovaruna.schedule.pipeline import Edge

logger = logging.getLogger(__name__)

_MEASURED, _PREDICTED = 0, 1
_STEPS_TOGETHER = ((32, 1), (256, 8))
"""Up to which step how many are written together; then `_MOST_TOGETHER`."""
_MOST_TOGETHER = 64
_SHORT_WAIT_SECONDS = 5e-6
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


class EventTrace:
    """Collects the spans of all ranks after each step, later after every few, and appends them to a file on rank 0.

    The file is a JSON array that is left open at its end, which trace viewers accept; so a run that is killed leaves
    a trace of the steps before. Of steps that are written together, which are no longer the first ones, only one has
    predicted rows and arrows: these take most of the time. After steps 2, 4, 8, ... a table in the log says where the
    time of the step went.

    Args:
        path: The file.
        world: The ranks.
        predicted: The simulated step.
        edges: What stages send each other.

    Raises:
        ConfigError: the file cannot be written, when training begins; the same kind on every rank. Later, training goes
            on without the rest of the trace.
    """

    def __init__(self, path: str, world: World, predicted: Simulation, edges: Sequence[Edge]) -> None:
        self._path = Path(path)
        self._world = world
        self._predicted = predicted
        self._num_steps = self._num_written = 0
        self._is_broken = False
        on_all(world, self._begin, "starting the trace")
        self.recorder = Recorder(offset_to_first(world))
        self._awaited = awaited_by(predicted, edges) if world.rank == 0 else {}

    def _begin(self) -> None:
        if self._world.rank == 0:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text("[\n" + "".join(_head(self._predicted)), encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"trace_events_file: {self._path} cannot be written ({error.strerror}); name a file that can be, "
                    "or leave out trace_events"
                ) from error

    def write_step(self) -> None:
        """Ends a step; appends what was recorded, if it is time to. Collective."""
        self.recorder.end_step()
        self._num_steps += 1
        if self._num_steps % next((num for last, num in _STEPS_TOGETHER if self._num_steps <= last), _MOST_TOGETHER):
            return
        known = self._world.gather_objects(self.recorder.take(), "writing the trace")
        if self._world.rank != 0 or self._is_broken:
            return
        try:
            self._append(known)
        except OSError as error:
            self._is_broken = True
            logger.warning("the trace ends here: %s cannot be written (%s)", self._path, error.strerror)

    def _append(self, known: Sequence[Sequence[Step]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for place, step in enumerate(zip(*known, strict=True)):
                self._num_written += 1
                file.writelines(self._rows(step, is_whole=place == 0))
                if self._num_written > 1 and self._num_written & (self._num_written - 1) == 0:
                    self._report(step)

    def _rows(self, step: Sequence[Step], *, is_whole: bool) -> list[str]:
        """Returns the lines of one step: measured and, if it is whole, predicted from its begin on, and messages."""
        rows: list[str] = []
        places: dict[str, tuple[int, float, float]] = {}
        number = self._num_written
        for rank, (spans, (last, end)) in enumerate(step):
            for name, begin, ready, done in spans:
                places[name] = rank, ready, done
                rows.append(_row(_MEASURED, rank, name, ready, done, number))
                if ready - begin > _SHORT_WAIT_SECONDS:
                    rows.append(_row(_MEASURED, rank, "wait", begin, ready, number))
            if spans:
                rows.append(_row(_MEASURED, rank, "all-reduce, loss", last, end, number))
        return rows + self._beside(step) + self._flows(places) if is_whole else rows

    def _beside(self, step: Sequence[Step]) -> list[str]:
        """Returns the predicted rows, from the begin of a step on."""
        rows: list[str] = []
        number = self._num_written
        start = min((spans[0][1] for spans, _ in step if spans), default=0.0)
        for event in self._predicted.events:
            begin, done = start + event.start_seconds, start + event.end_seconds
            rows.append(_row(_PREDICTED, event.rank, str(event.instruction), begin, done, number))
        for reduction in self._predicted.reductions:
            begin, done = start + reduction.start_seconds, start + reduction.end_seconds
            rows += [_row(_PREDICTED, rank, "all-reduce", begin, done, number) for rank in reduction.ranks]
        return rows

    def _flows(self, places: dict[str, tuple[int, float, float]]) -> list[str]:
        """Returns an arrow for each message between ranks."""
        rows = []
        for name, senders in self._awaited.items():
            for sender in senders:
                if name in places and sender in places and places[name][0] != places[sender][0]:
                    arrow = f"{self._num_written}/{sender}/{name}"
                    left = min(places[sender][2], places[name][1])  # it leaves a little before its instruction ends
                    rows.append(_arrow("s", places[sender][0], left, arrow))
                    rows.append(_arrow("f", places[name][0], places[name][1], arrow))
        return rows

    def _report(self, step: Sequence[Step]) -> None:
        seconds, lost = account([spans for spans, _ in step], [ends for _, ends in step], self._awaited)
        text = table(seconds, self._predicted.step_seconds - max(self._predicted.optimizer_seconds, default=0.0), lost)
        logger.info("step %d: %s", self._num_written, text)


def awaited_by(predicted: Simulation, edges: Sequence[Edge]) -> dict[str, list[str]]:
    """Returns, for each instruction that waits for messages, the instructions that send them."""
    awaited: dict[str, list[str]] = {}
    for row in predicted.schedule:
        for step in row:
            if step.kind is Kind.FORWARD:
                senders = [edge.source for edge in edges if edge.destination == step.stage]
            else:
                senders = [edge.destination for edge in edges if edge.source == step.stage and edge.needs_gradient]
            if senders and step.kind in (Kind.FORWARD, Kind.BACKWARD):
                awaited[str(step)] = [str(Instruction(stage, step.kind, step.micro_batch)) for stage in senders]
    return awaited


def _head(predicted: Simulation) -> list[str]:
    """Returns the lines that name the rows."""
    rows = []
    for process, name in ((_MEASURED, "measured"), (_PREDICTED, "predicted")):
        rows.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for rank in range(len(predicted.acts)):
            rows.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            )
    return [json.dumps(row) + ",\n" for row in rows]


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
