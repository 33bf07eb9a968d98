"""Defines `Run`: how far the training of one model is on this rank, and whether it ends."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import cached_property
from typing import NoReturn

from autovaruna.config.settings import Settings, log_settings
from autovaruna.elastic.job_folder import job_place
from autovaruna.elastic.rank_script import SAVED
from autovaruna.interception.ending import ERRORS_IN_FEW_LINES, LISTENING, has_signal, signal_names
from autovaruna.log import configure, show_all_frames
from autovaruna.ranks.environment import get_world
from autovaruna.ranks.world import World
from autovaruna.runtime.clipping import CLIPPING, METRICS
from autovaruna.runtime.metrics import Metrics
from autovaruna.session.agreement import ScriptActions
from autovaruna.session.manager_link import ManagerLink

logger = logging.getLogger(__name__)


class Run:
    """The state of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.installed = ExitStack()  # undoes what was put on objects of the script; holds nothing of the model
        self.actions = ScriptActions()
        self.is_stop_wanted = False  # whether the script of this rank wants the run to end
        self.is_stop_agreed = False  # whether all ranks know, since the same call: they end together, at one step
        self.metrics = Metrics()
        self.num_calls = 0  # of the model so far
        self.is_synchronising = True  # whether gradients are summed over ranks now
        self._is_listening = False
        self._number = self._first_step = 0

    @cached_property
    def world(self) -> World:
        """The ranks; the first use starts MPI."""
        world = get_world()
        configure(world.rank, verbosity=self.settings.verbosity)
        show_all_frames(self.settings.full_tracebacks)
        world.watch.stalls.report_seconds = self.settings.stall_report_seconds
        world.watch.stalls.limit_seconds = self.settings.stall_limit_seconds
        if self.settings.show_settings:
            log_settings(self.settings)
        return world

    @cached_property
    def manager(self) -> ManagerLink | None:
        """The link to the manager of the job; None: there is none."""
        place = job_place()
        return None if place is None else ManagerLink(place, self.world)

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far; without one, calls of the model."""
        return self.num_calls if self.actions.optimizer is None else self.actions.num_steps

    @property
    def step(self) -> int:
        """The number that the script gives the state as it is now."""
        return self._first_step + self.num_steps

    def set_step(self, step: int) -> None:
        """Sets the number that the script gives the state as it is now."""
        self._first_step = step - self.num_steps

    @property
    def of_model(self) -> str:
        """Says, behind what ranks do together, which model they do it with: the first one needs no word."""
        if not self._number:
            self.world.num_models += 1
            self._number = self.world.num_models
        return "" if self._number == 1 else f" (model {self._number})"

    def install(self) -> None:
        """Installs what every run has in the user's process."""
        self.installed.callback(ERRORS_IN_FEW_LINES.acquire())
        self.installed.callback(CLIPPING.acquire())
        METRICS.add(self.metrics)
        if self.settings.save_on_signal:
            self.listen()

    def listen(self) -> None:
        """Hears signals that ask the process to end, from now on."""
        if not self._is_listening:
            self._is_listening = True
            self.installed.callback(LISTENING.acquire())

    @property
    def is_stop_wanted_here(self) -> bool:
        """Whether this rank's script wants the run to end, or a signal has come: what it reports at the next call."""
        return self.is_stop_wanted or has_signal()

    def end(self, step: int) -> NoReturn:
        """Ends this rank with `SAVED`, once the state is saved under its number; every rank does."""
        names = signal_names() or "a signal on another rank"
        logger.warning("got %s: saved step %d, and end with status %d", names, step, SAVED)
        raise SystemExit(SAVED)
