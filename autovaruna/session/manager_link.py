"""Defines `ManagerLink`: what a rank does for the manager that starts its job again when hosts come and go.

The manager has snapshots taken where the optimizer has stepped and the next call of the model begins, and wants the job
to end there. Whether either is due travels in the `Report` of a call; after that call all ranks know the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autovaruna.checkpoint.state import Content, ModelInTraining, generator_states
from autovaruna.elastic.job_folder import REFUSED, JobPlace, Reporter, job_place
from autovaruna.elastic.rank_script import HELD
from autovaruna.elastic.snapshot import HasPosition, Snapshots
from autovaruna.errors import CheckpointError, ConfigError
from autovaruna.interception.ending import has_signal
from autovaruna.interception.optimizer_proxy import OptimizerProxy
from autovaruna.planner.records import Plan
from autovaruna.ranks.world import World

logger = logging.getLogger(__name__)


@cache
def _reporter(place: JobPlace, rank: int) -> Reporter:
    """Returns the one reporter of this process, however many models it has."""
    return Reporter(place.of_rank(rank))


def report_end(world: World) -> None:
    """Reports to the manager, if there is one, that the script ends because it was asked to, and has not finished."""
    if (place := job_place()) is not None:
        reporter = _reporter(place, world.rank)
        reporter.progress.is_signalled = True
        reporter.write()


class ManagerLink:
    """What one rank does for the manager of its job."""

    def __init__(self, place: JobPlace, world: World) -> None:
        self.place, self._world = place, world
        self._reporter = _reporter(place, world.rank)
        self._snapshots: Snapshots | None = None
        self._num_batches = 0
        self._content: Callable[[int], Content] = Content
        self._generators: Mapping[str, Tensor] | None = None
        self._takes_snapshot = self._is_leaving = False

    def keep_state(
        self,
        optimizer: OptimizerProxy | None,
        *,
        scaler: Any = None,
        lr_scheduler: Any = None,
        sampler: HasPosition | None = None,
        extra: Callable[[], Any] | None = None,
    ) -> None:
        """Takes snapshots from now on; arguments are as for ``resume``.

        At the optimizer's steps, generators are where the next step's draws begin.
        """
        if self._snapshots is None:
            self._snapshots = Snapshots(self.place, self._world.rank, self._reporter)
            if optimizer is not None:
                optimizer.after.append(self._record_generators)
        num_before = (0 if sampler is None else sampler.state_dict()["num_batches"]) - self._num_batches

        def content(step: int) -> Content:
            position = None if sampler is None else sampler.state_dict(num_before + self._num_batches)
            more = None if extra is None else extra()
            return Content(step, position, more, scaler, lr_scheduler, self._generators)

        self._content = content
        self._reporter.progress.is_kept = True
        self._reporter.write()

    def _record_generators(self) -> None:
        self._generators = generator_states()

    @property
    def is_snapshot_ready(self) -> bool:
        """Whether this rank can take the next snapshot."""
        return self._snapshots is not None and self._snapshots.is_ready

    @property
    def is_to_leave(self) -> bool:
        return self._snapshots is not None and (has_signal() or self._snapshots.is_to_leave)

    @contextmanager
    def loading_state(self) -> Iterator[None]:
        """Tells the manager of a state in memory of hosts that cannot be loaded: the next run takes an older one."""
        try:
            yield
        except CheckpointError as error:
            if type(error) is CheckpointError and not error.is_second_hand:  # not of a host that could not be reached
                Path(self.place.folder, REFUSED).write_text(str(error))
            raise

    def agree(self, are_ready: bool, is_any_to_leave: bool) -> None:
        """Decides what is due at the next border: whether all ranks can take a snapshot, and any is to leave."""
        self._takes_snapshot = are_ready
        self._is_leaving |= is_any_to_leave

    def begin_call(self, step: int, work_seconds: float, plan: Plan | None) -> None:
        """Reports that a call begins, with the number of the state and the seconds of computing here so far."""
        if plan is not None and self._world.rank == 0:
            self._reporter.predict(plan.work_seconds)
        self._reporter.begin_call(step, has_signal(), work_seconds)

    def end_call(self) -> None:
        """Reports that the script goes on."""
        self._num_batches += torch.is_grad_enabled()
        self._reporter.end_call()

    def at_border(self, subject: Callable[[], ModelInTraining], num_steps: int, step: int) -> None:
        """Takes the snapshot of a `step`, if all ranks have agreed to; the optimizer has stepped. Collective."""
        if self._snapshots is not None:
            self._snapshots.begin_border(num_steps)
            if self._takes_snapshot or self._is_leaving:
                self._snapshots.write(subject(), self._content(step))

    def end_if_agreed(self, step: int) -> None:
        """Ends this rank, if all ranks have agreed to, once others have its snapshot of a step. Collective."""
        if self._snapshots is not None and self._is_leaving:
            self._snapshots.wait_for_copy()
            self._world.barrier("leaving together")
            logger.info("step %d is in memory of the hosts: this rank leaves, to be started again", step)
            raise SystemExit(HELD)


def refuse_several(num_models: int) -> None:
    """Raises ConfigError for a script with several models, whose states of one step no snapshot of one of them is."""
    if num_models > 1:
        raise ConfigError(
            f"resume() is of a script with one model: got {num_models}, whose states belong together. Save all of them "
            "at one step with save_checkpoint(), each in a folder of its own, and load_checkpoint() all of them."
        )
