"""Writes one Chrome trace of all ranks: what each instruction took, with the predicted rows beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from autovaruna.errors import ConfigError
from autovaruna.runtime.lost import account, table
from autovaruna.runtime.recorder import Recorder, Step
from autovaruna.runtime.trace_rows import arrows, beside, head, measured
from autovaruna.runtime.worlds.clock import offset_to_first
from autovaruna.runtime.worlds.on_all import on_all
from autovaruna.runtime.worlds.world import World
from autovaruna.schedule import Simulation
from autovaruna.schedule.instruction import Instruction, Kind
from autovaruna.schedule.pipeline import Edge

logger = logging.getLogger(__name__)

_STEPS_TOGETHER = ((32, 1), (256, 8))
"""Up to which step how many are written together; then `_MOST_TOGETHER`."""
_MOST_TOGETHER = 64
_TAG = 1 << 17

Part = tuple[str, dict[int, Step]]
"""What a rank gives to the trace: its rows, and the steps, by number, of which more is said."""


class EventTrace:
    """Collects what all ranks did after each step, later after every few, and appends it to a file on rank 0.

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
                self._path.write_text("[\n" + "".join(head(self._predicted)), encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"trace_events_file: {self._path} cannot be written ({error.strerror}); name a file that can be, "
                    "or leave out trace_events"
                ) from error

    def write_step(self) -> None:
        """Ends a step. If it is time to, hands what was recorded to rank 0, which waits for all and appends it."""
        self.recorder.end_step()
        self._num_steps += 1
        if self._num_steps % next((num for last, num in _STEPS_TOGETHER if self._num_steps <= last), _MOST_TOGETHER):
            return
        whole = self._num_written + 1
        own = self._own_part(whole)
        if self._world.rank != 0:
            self._world.send_object(own, 0, _TAG)
            return
        parts = [own, *(self._world.receive_object(rank, _TAG) for rank in range(1, self._world.num_ranks))]
        if not self._is_broken:
            try:
                self._append(parts, whole)
            except OSError as error:
                self._is_broken = True
                logger.warning("the trace ends here: %s cannot be written (%s)", self._path, error.strerror)

    def _own_part(self, whole: int) -> Part:
        """Returns what this rank gives of the steps from number `whole` on."""
        steps = dict(enumerate(self.recorder.take(), whole))
        self._num_written += len(steps)
        more = {number: step for number, step in steps.items() if number == whole or _is_reported(number)}
        return measured(self._world.rank, steps), more

    def _append(self, parts: Sequence[Part], whole: int) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(rows for rows, _ in parts)
            for number in parts[0][1]:
                step = [steps[number] for _, steps in parts]
                if number == whole:
                    start = min((spans[0][1] for spans, _ in step if spans), default=0.0)
                    file.writelines(beside(self._predicted, start, number))
                    file.writelines(arrows(step, self._awaited, number))
                if _is_reported(number):
                    self._report(number, step)

    def _report(self, number: int, step: Sequence[Step]) -> None:
        seconds, lost = account([spans for spans, _ in step], [ends for _, ends in step], self._awaited)
        text = table(seconds, self._predicted.step_seconds - max(self._predicted.optimizer_seconds, default=0.0), lost)
        logger.info("step %d: %s", number, text)


def _is_reported(number: int) -> bool:
    return number > 1 and number & (number - 1) == 0


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
