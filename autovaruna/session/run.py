"""Defines `Run`: how far the training of one model is on this rank, with which ranks, and whether it is to end."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import NoReturn

from autovaruna.config.settings import Settings, log_settings
from autovaruna.elastic.job_folder import job_place
from autovaruna.elastic.rank_script import SAVED
from autovaruna.interception.ending import ERRORS_IN_FEW_LINES, LISTENING, has_signal, signal_names
from autovaruna.interception.installed import Installed
from autovaruna.log import configure, show_all_frames
from autovaruna.runtime.clipping import CLIPPING, METRICS
from autovaruna.runtime.environment import get_world
from autovaruna.runtime.metrics import Metrics
from autovaruna.runtime.world import World
from autovaruna.session.manager_link import ManagerLink
from autovaruna.session.script_actions import ScriptActions

logger = logging.getLogger(__name__)


class Run:
    """The state of a run.

    Attributes:
        installed: what was put on objects of the script, with its undo.
        actions: what the script has done with model and optimizer.
        stopping: whether the run is to end.
        metrics: the last step in numbers.
        num_calls: calls of the model so far.
        is_synchronising: whether gradients are summed over ranks now.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.installed = Installed()
        self.actions = ScriptActions()
        self.stopping = Stopping()
        self.metrics = Metrics()
        self.num_calls = 0
        self.is_synchronising = True
        self._is_listening = False
        self._number = 0

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
        return self.actions.num_steps if self.actions.has_optimizer else self.num_calls

    @property
    def of_model(self) -> str:
        """Says, behind what ranks do together, which model they do it with: the first one needs no word."""
        if not self._number:
            self.world.num_models += 1
            self._number = self.world.num_models
        return "" if self._number == 1 else f" (model {self._number})"

    def install(self) -> None:
        """Installs what every run has in the user's process."""
        self.installed.add(ERRORS_IN_FEW_LINES.use())
        self.installed.add(CLIPPING.use())
        METRICS.add(self.metrics)
        if self.settings.save_on_signal:
            self.listen()

    def listen(self) -> None:
        """Hears signals that ask the process to end, from now on."""
        if not self._is_listening:
            self._is_listening = True
            self.installed.add(LISTENING.use())


class Stopping:
    """Whether the run is to end: ranks do so together, at one step, after a signal that came to any at any time."""

    def __init__(self) -> None:
        self.is_agreed = False  # whether all ranks know, since the same call, that it is
        self.is_wanted = False  # whether the script of this rank wants it
        self._first_step = 0

    @property
    def is_wanted_here(self) -> bool:
        """Whether this rank's script wants it, or a signal has come: what the rank reports at the next call."""
        return self.is_wanted or has_signal()

    def number_from(self, step: int, num_steps: int) -> None:
        """Sets the number that the script gives the state after so many steps of its optimizer."""
        self._first_step = step - num_steps

    def step_after(self, num_steps: int) -> int:
        """Returns the number that the script gives the state after so many steps of its optimizer."""
        return self._first_step + num_steps

    def end(self, step: int) -> NoReturn:
        """Ends this rank with `SAVED`, once the state is saved under its number; every rank does."""
        names = signal_names() or "a signal on another rank"
        logger.warning("got %s: saved step %d, and end with status %d", names, step, SAVED)
        raise SystemExit(SAVED)
