"""Defines `Morphing`: what a rank does for a manager that starts its job again when hosts come and go.

All of it happens where the optimizer has stepped and the next call of the model begins: snapshots are taken there, and
there the job ends when the manager, or a signal to any rank, wants it to. Whether either is due travels with what ranks
tell each other at a call anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autovaruna.checkpoint.snapshot import HasPosition, Snapshots
from autovaruna.checkpoint.state import Content, Subject, generator_states
from autovaruna.errors import ConfigError
from autovaruna.planner.records import Plan, predicted_seconds
from autovaruna.runtime.progress import JobPlace, Reporter, job_place
from autovaruna.runtime.world import World
from autovaruna.session.stopping import STATUS, has_heard, listen

Wishes = tuple[bool, bool]
"""Whether a rank can take the next snapshot, and whether it is to leave."""
NO_WISHES: Wishes = False, False

logger = logging.getLogger(__name__)


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
        self._num_steps = 0
        self._first_step = 0

    def hold(
        self,
        step: int,
        optimizer: Optimizer | None,
        scaler: Any = None,
        lr_scheduler: Any = None,
        sampler: HasPosition | None = None,
        extra: Callable[[], Any] | None = None,
    ) -> None:
        """Takes snapshots from now on; the run's state has the number `step` now, the rest is as for ``resume``.

        At the optimizer's steps, generators are where the next step's draws begin.
        """
        listen()
        self._first_step = step
        if self._snapshots is None:
            self._snapshots = Snapshots(self.place, self._world.rank, self._reporter)
            if optimizer is not None:
                optimizer.register_step_post_hook(self._note_generators)
        num_before = (0 if sampler is None else sampler.state_dict()["num_batches"]) - self._num_batches

        def content(step: int) -> Content:
            position = None if sampler is None else sampler.state_dict(num_before + self._num_batches)
            more = None if extra is None else extra()
            return Content(step, position, more, scaler, lr_scheduler, self._generators)

        self._content = content
        self._reporter.progress.is_kept = True
        self._reporter.write()

    def _note_generators(self, *_: object) -> None:
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
        self._reporter.progress.hears_end = True
        self._reporter.write()

    def end_call(self) -> None:
        """Tells the host's keeper that the script goes on."""
        self._num_batches += torch.is_grad_enabled()
        self._reporter.end_call()

    def at_border(self, subject: Callable[[], Subject], num_steps: int, step: int) -> None:
        """Takes a snapshot and ends this rank, if all ranks have agreed to, and the optimizer has stepped. Collective.

        `step` is the number that the script gives the state after `num_steps` steps of the optimizer.
        """
        has_stepped, self._num_steps = num_steps != self._num_steps, num_steps
        if self._snapshots is None or not has_stepped:
            return
        self._snapshots.begin_border(num_steps)
        if self._takes or self._leaves:
            self._snapshots.take(subject(), self._content(step))
        if self._leaves:
            self._snapshots.wait_for_copy()
            self._world.barrier("leaving together")
            logger.info("step %d is in memory of the hosts: this rank leaves, to be started again", step)
            raise SystemExit(STATUS)


def find_morphing(world: World) -> Morphing | None:
    """Returns what a rank does for the manager of its job; None: there is no manager."""
    place = job_place()
    return None if place is None else Morphing(place, world)


def refuse_several(num_models: int) -> None:
    """Raises ConfigError for a script with several models, whose states of one step no snapshot of one of them is."""
    if num_models > 1:
        raise ConfigError(
            f"resume() is of a script with one model: got {num_models}, whose states belong together. Save all of them "
            "at one step with save_checkpoint(), each in a folder of its own, and load_checkpoint() all of them."
        )
