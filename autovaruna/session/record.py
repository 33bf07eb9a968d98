"""Writes what a run does into a folder (setting ``report_dir``), of which ``autovaruna report`` makes a page.

deployment.json     the plan, with what it is valid for
events.trace.json   what ran when in the first steps, measured and predicted
events.jsonl        a line for the start of each attempt, for steps, and for where the time of some went; in the form of
                    ``autovaruna run --events``, which may write into the same file
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from autovaruna.config.files import check_writable
from autovaruna.elastic.notices import EventLog
from autovaruna.planner.prediction import policy_of
from autovaruna.planner.table import module_range
from autovaruna.ranks.world import on_all
from autovaruna.runtime.timeline import EventTrace
from autovaruna.schedule.simulation import StepSeconds
from autovaruna.schedule.simulator import simulate
from autovaruna.session.preparation import Prepared
from autovaruna.session.run import Run

DEPLOYMENT, EVENTS = "deployment.json", "events.jsonl"
_NUM_TRACED_STEPS = 16
_NUM_FIRST_STEPS, _SECONDS_BETWEEN = 200, 1.0  # each of the first steps is written, later one a second


class RunRecord:
    """The events of a run, written by rank 0."""

    def __init__(self, run: Run, model: str, stages: Sequence[str]) -> None:
        self._run, self._num_written, self._written = run, 0, 0.0
        path = Path(run.settings.report_dir, EVENTS)
        check_writable("report_dir", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = EventLog(str(path))
        settings, world = run.settings, run.world
        names = [name for name in settings.as_dict() if settings.source_of(name) != "default"]
        details = {"model": model, "stages": stages, "num_ranks": world.num_ranks, "hosts": world.hosts}
        details["settings"] = {name: repr(getattr(settings, name)) for name in names}
        num_cores = world.transport.host_cores or len(os.sched_getaffinity(0))  # of this rank's host
        threads = {"num_cores": num_cores, "num_threads": torch.get_num_threads()}
        self._write("start", f"{model} trains, ranks: {world.num_ranks}", **(details | threads))

    def _write(self, what: str, text: str, **details: Any) -> None:
        self._log.record(what, text, is_shown=False, **details)

    def record_step(self) -> None:
        now = perf_counter()
        if self._num_written >= _NUM_FIRST_STEPS and now - self._written < _SECONDS_BETWEEN:
            return
        self._num_written, self._written = self._num_written + 1, now
        step = self._run.step
        self._write("step", f"step {step}", step=step, **self._run.metrics.to_dict())

    def record_account(self, number: int, predicted: float, lost: Sequence[StepSeconds]) -> None:
        """Records where the seconds of a step went on each rank."""
        times = {"call": number, "seconds": lost[0].step, "predicted_seconds": predicted}
        self._write("account", f"where call {number} went", **times, ranks=[each.parts for each in lost])


def start_record(
    run: Run, model: str, stages: Sequence[str] = (), save: Callable[[str], None] | None = None
) -> RunRecord | None:
    """Starts the record of a run on rank 0, if it is to have one; None: it is not, or on another rank. Collective.

    `stages` are what each has, in words; `save` writes the deployment. Raises ConfigError or DeploymentError on every
    rank if the folder cannot be written.
    """

    def act() -> RunRecord | None:
        if run.world.rank > 0:
            return None
        record = RunRecord(run, model, stages)
        if save is not None:
            save(str(Path(run.settings.report_dir, DEPLOYMENT)))
        return record

    if not run.settings.report_dir:
        return None
    record = on_all(run.world, act, "starting the record of the run")
    if record is not None:
        run.metrics.on_step = record.record_step
    return record


def start_trace(run: Run, model: str, prepared: Prepared) -> EventTrace | None:
    """Starts the trace of every step, or of the first ones with the record of a run, if asked for. Collective."""
    settings, pipeline = run.settings, prepared.orders.pipeline
    is_recorded = settings.report_dir and not run.of_model
    if not (settings.trace_events or is_recorded):
        return None
    path = str(Path(settings.report_dir if is_recorded else "", settings.trace_events_file))
    predicted = simulate(pipeline, policy_of(prepared.plan.schedule))
    trace = EventTrace(path, run.world, predicted, pipeline.edges)
    trace.num_steps_left = math.inf if settings.trace_events else _NUM_TRACED_STEPS
    if is_recorded:
        stages = [module_range(stage.blocks, prepared.graph) for stage in prepared.plan.stages]
        record = start_record(run, model, stages, prepared.save)
        trace.on_account = None if record is None else record.record_account
    return trace
