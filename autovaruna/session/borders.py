"""What is due between two steps, where the optimizer has stepped and the next call of the model begins.

`Stopping`: ranks end a run together, at one step, after a signal that came to any of them at any time. `Morphing`: a
manager that starts the job again when hosts come and go has snapshots taken, and wants the job to end. Whether either
is due travels with what ranks tell each other at a call anyway; after that call all know the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from autovaruna.checkpoint.state import Content, ModelInTraining, generator_states
from autovaruna.elastic.progress import HELD, SAVED, JobPlace, Reporter
from autovaruna.elastic.snapshot import HasPosition, Snapshots
from autovaruna.errors import ConfigError
from autovaruna.interception.optimizer_proxy import OptimizerProxy
from autovaruna.interception.signals import has_heard, heard_names
from autovaruna.planner.records import Plan, predicted_seconds
from autovaruna.runtime.world import World

logger = logging.getLogger(__name__)


class Stopping:
    """Whether the run is to end, as one model's calls make it known."""

    def __init__(self) -> None:
        self.is_agreed = False  # whether all ranks know, since the same call, that it is
        self.is_wanted = False  # whether the script of this rank wants it
        self._first_step = 0

    @property
    def own(self) -> bool:
        """Whether this rank wants it: what it tells the others at the next call."""
        return self.is_wanted or has_heard()

    def number_from(self, step: int, num_steps: int) -> None:
        """Takes the number that the script gives the state after so many steps of its optimizer."""
        self._first_step = step - num_steps

    def step_after(self, num_steps: int) -> int:
        """Returns the number that the script gives the state after so many steps of its optimizer."""
        return self._first_step + num_steps

    def end(self, step: int) -> NoReturn:
        """Ends this rank with `SAVED`, once the state is saved under its number; every rank does."""
        names = heard_names() or "a signal on another rank"
        logger.warning("got %s: saved step %d, and end with status %d", names, step, SAVED)
        raise SystemExit(SAVED)


Wishes = tuple[bool, bool]  # whether a rank can take the next snapshot, and whether it is to leave
NO_WISHES: Wishes = False, False


@cache
def _reporter(place: JobPlace, rank: int) -> Reporter:
    """Returns the one reporter of this process, however many models it has."""
    return Reporter(place.of_rank(rank))


class Morphing:
    """What one rank does for the manager of its job."""

    def __init__(self, place: JobPlace, world: World) -> None:
        self.place = place
        self._world = world
        self._reporter = _reporter(place, world.rank)
        self._snapshots: Snapshots | None = None
        self._num_batches = 0
        self._content: Callable[[int], Content] = Content
        self._generators: Mapping[str, Tensor] | None = None
        self._takes, self._leaves = NO_WISHES
        self._first_step = 0

    def hold(
        self,
        step: int,
        optimizer: OptimizerProxy | None,
        scaler: Any = None,
        lr_scheduler: Any = None,
        sampler: HasPosition | None = None,
        extra: Callable[[], Any] | None = None,
    ) -> None:
        """Takes snapshots from now on; the run's state has the number `step` now, the rest is as for ``resume``.

        At the optimizer's steps, generators are where the next step's draws begin.
        """
        self._first_step = step
        if self._snapshots is None:
            self._snapshots = Snapshots(self.place, self._world.rank, self._reporter)
            if optimizer is not None:
                optimizer.after.append(self._note_generators)
        num_before = (0 if sampler is None else sampler.state_dict()["num_batches"]) - self._num_batches

        def content(step: int) -> Content:
            position = None if sampler is None else sampler.state_dict(num_before + self._num_batches)
            more = None if extra is None else extra()
            return Content(step, position, more, scaler, lr_scheduler, self._generators)

        self._content = content
        self._reporter.progress.is_kept = True
        self._reporter.write()

    def _note_generators(self) -> None:
        self._generators = generator_states()

    @property
    def wishes(self) -> Wishes:
        """What this rank tells the others at a call."""
        if self._snapshots is None:
            return NO_WISHES
        return self._snapshots.is_ready, has_heard() or self._snapshots.is_to_leave

    def agree(self, wishes: Iterable[Wishes]) -> None:
        """Takes what all ranks have told."""
        every = list(wishes)
        self._takes = all(is_ready for is_ready, _ in every)
        self._leaves |= any(leaves for _, leaves in every)

    def begin_call(self, num_steps: int, work_seconds: float, plan: Plan | None) -> None:
        """Tells the host's keeper that a call begins, after so many steps and seconds of computing here."""
        if plan is not None and self._world.rank == 0:
            self._reporter.predict(partial(predicted_seconds, plan))
        self._reporter.begin_call(self._first_step + num_steps, has_heard(), work_seconds)

    def tell_end(self) -> None:
        """Tells the host's keeper that this rank ends because it was asked to."""
        self._reporter.progress.is_asked_to_end = True
        self._reporter.write()

    def end_call(self) -> None:
        """Tells the host's keeper that the script goes on."""
        self._num_batches += torch.is_grad_enabled()
        self._reporter.end_call()

    def at_border(self, subject: Callable[[], ModelInTraining], num_steps: int, step: int) -> None:
        """Takes a snapshot, if all ranks have agreed to; the optimizer has stepped. Collective.

        `step` is the number that the script gives the state after `num_steps` steps of the optimizer.
        """
        if self._snapshots is not None:
            self._snapshots.begin_border(num_steps)
            if self._takes or self._leaves:
                self._snapshots.take(subject(), self._content(step))

    def end_if_agreed(self, step: int) -> None:
        """Ends this rank, if all ranks have agreed to, once others have its snapshot of a step. Collective."""
        if self._snapshots is not None and self._leaves:
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
