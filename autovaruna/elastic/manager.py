"""Defines `Manager`: starts a job, and starts it again on the hosts that there are, from the newest state they have.

One mpirun never outlives one of its hosts, so there is one mechanism for whatever happens: end the job, at a step's
border if there is time, or find it ended; find the newest state that the hosts have whole; start the job on what is
there. A job has finished only when every rank has said so.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from autovaruna.elastic.hosts import BEAT_SECONDS, LOOK_SECONDS, Hosts
from autovaruna.elastic.job import Grid, Job, handling, show
from autovaruna.elastic.notices import EventLog, Notices
from autovaruna.elastic.options import Options
from autovaruna.elastic.run import LEFT, Outcome, Run
from autovaruna.elastic.snapshots import Checkpoints, State, find_state, hand_out
from autovaruna.elastic.standby import SOCKET
from autovaruna.elastic.watch import Watch
from autovaruna.planner.ahead import deployment_name
from autovaruna.runtime.progress import JobPlace

DEFAULT_DEPLOYMENT = "deployment.json"
_DEPLOYMENT = "AUTOVARUNA_DEPLOYMENT_FILE"
_HOUR = 3600.0
_NO_PROGRESS = 3  # how often the job is started again after a fault of its own without having come any further


class Manager:
    """Looks after one job from its first start to its end; ConfigError if it cannot be started.

    `choose` returns options with stages and micro-batch size for some hosts, and the ranks of each stage.
    """

    def __init__(self, options: Options, choose: Callable[[Options], tuple[Options, Grid | None]]) -> None:
        assert options.morphing is not None
        self._options = options
        self._ways = ways = options.morphing
        self._choose = choose
        self._log = EventLog(ways.events)
        self._notices = Notices(lambda host, seconds: self._hosts.notice(host, seconds))
        self._folder = Path(ways.memory, f"autovaruna-{os.getuid()}-{secrets.token_hex(4)}")
        settings = {"folder": str(self._folder), "token": secrets.token_hex(32), "standby": ways.has_standby}
        self._hosts = Hosts(options.hosts, ways, settings, self._notices.path, self._log)
        self._checkpoints = Checkpoints(ways.checkpoints, ways.checkpoint_seconds, self._log)
        self._run: Run | None = None
        self._watch = Watch(0)
        self._held = self._gone = -1, 0  # the newest step that was whole, and of which run; the same if it is lost
        self._began = time.monotonic()
        self._restarts = Restarts(self._ways.max_restarts)
        self._signals: list[signal.Signals] = []
        self._first_signal = 0.0

    def run(self) -> int:
        """Runs the job to its end and returns its status."""
        with handling(self._hear), self._notices:
            try:
                self._hosts.start(self._end_if_asked)
                while True:
                    outcome = self._run_once()
                    if outcome.status is not None:
                        self._note_end(outcome)
                        return outcome.status
                    if (status := self._give_up(outcome)) is not None:
                        return status
            finally:
                if self._run is not None:
                    self._run.end(list(self._hosts.links))
                self._hosts.close()

    # a start

    def _run_once(self) -> Outcome:
        """Starts the job on what is there, and returns how it ended."""
        self._wait_for_hosts()
        began = time.monotonic()
        names, state = self._put_state()
        seconds = {"state": time.monotonic() - began}
        options, grid = self._choose(replace(self._options, hosts=names))
        deployment = self._deployment(names)
        is_old = self._hosts.slow.begin(names)
        options = replace(options, variables={**_variables_of_plan(deployment, is_old), **options.variables})
        if state is not None:
            options = replace(options, resume_step=state.step)
        factors = self._hosts.slow.factors()
        self._watch = Watch(self._watch.attempt + 1, self._watch.longest_seconds, factors)
        step = None if state is None else state.step
        number, checkpoints = self._watch.attempt, self._ways.checkpoints
        place = JobPlace(str(self._folder), number, len(names), step, checkpoints, deployment, factors)
        standby = str(self._folder / SOCKET) if self._ways.has_standby else ""
        self._run = run = Run(self._hosts, options, grid, place, standby, self._watch, self._log, self._held)
        self._note_start(names, state, run.job.num_ranks)
        outcome = run.follow(self._began, seconds, self._checkpoints, self._signals)
        self._held = run.held
        run.end([host for host in names if host not in outcome.lost])
        return outcome

    def _wait_for_hosts(self) -> dict[str, int]:
        """Returns the hosts to run on, once there are enough."""
        has_told = False
        while sum((names := self._hosts.usable()).values()) < self._ways.min_ranks or not names:
            self._end_if_asked()
            if not has_told and time.monotonic() - self._began > BEAT_SECONDS:
                has_told = True
                there, least = sum(names.values()), self._ways.min_ranks
                self._log.note("waiting", f"{there} ranks of at least {least}: waiting for hosts")
            self._hosts.look_around()
            time.sleep(LOOK_SECONDS)
        return names

    def _put_state(self) -> tuple[dict[str, int], State | None]:
        """Returns hosts to run on that have got the newest state that there is; None: there is none in memory."""
        while True:
            state = self._find_state() if self._watch.attempt else None
            names = self._wait_for_hosts()
            failed = {} if state is None else hand_out(state, names, self._hosts.links)
            if not failed:
                return names, state
            for host in failed.keys() & self._hosts.up().keys():
                self._hosts.leave_out(host, f"it cannot take a state: {failed[host]}")

    def _find_state(self) -> State | None:
        """Returns the newest state that there is; hosts that may have a newer one are waited for, for a while."""
        deadline, has_told = time.monotonic() + self._ways.state_wait_seconds, False
        while True:
            up = self._hosts.up()
            state, missing = find_state(list(up.values())), sorted(self._hosts.links.keys() - up.keys())
            if self._gone == self._held or (state is not None and state.step >= self._held[0]):
                return state
            if is_over := not missing or time.monotonic() > deadline:
                self._gone = self._held
            if is_over or not has_told:
                has_told, seconds = True, self._ways.state_wait_seconds
                what = "going back" if is_over else f"waiting for {', '.join(missing)}, {seconds:g} s at most"
                self._log.note("waiting", f"step {self._held[0]} is not whole on the hosts that answer: {what}")
            self._end_if_asked()
            self._hosts.look_around()
            time.sleep(BEAT_SECONDS)

    def _deployment(self, names: Mapping[str, int]) -> str:
        """Returns the file of the plan for some hosts; empty: the user has named one, whatever the hosts are."""
        if _DEPLOYMENT in os.environ or _DEPLOYMENT in self._options.variables:
            return ""
        return DEFAULT_DEPLOYMENT if names == self._options.hosts else deployment_name(names.values())

    def _note_start(self, names: Mapping[str, int], state: State | None, num_ranks: int) -> None:
        where = f"{num_ranks} ranks on {', '.join(names)}"
        known: dict[str, Any] = {"hosts": list(names), "ranks": num_ranks}
        if state is None:
            self._log.note("start", f"start on {where}", **known)
            return
        text = f"goes on from step {state.step}, in memory of {', '.join(state.hosts)}: {where}"
        self._log.note("start", text, **(known | {"step": state.step, "from": state.hosts}))

    # signals

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal; a later one that asks to end ends the job at once."""
        heard, now = signal.Signals(number), time.monotonic()
        is_later = bool(self._signals) and now - self._first_signal > BEAT_SECONDS  # a scheduler may send several
        self._first_signal = self._first_signal if self._signals else now
        self._signals.append(heard)
        is_hasty = heard in (signal.SIGINT, signal.SIGHUP) or is_later
        if is_hasty and self._run is not None:
            self._run.job.kill()
        if is_hasty or self._run is None:
            raise KeyboardInterrupt

    def _end_if_asked(self) -> None:
        if self._signals:
            raise KeyboardInterrupt

    # an end

    def _note_end(self, outcome: Outcome) -> None:
        """Notes the end of the whole job; what was asked to end is on disk first, if there is a folder for it."""
        if outcome.status == LEFT and self._ways.checkpoints is not None:
            self._checkpoints.save(list(self._hosts.up().values()))
        elif outcome.status == LEFT and self._watch.holds_any:
            text = f"step {self._watch.num_steps} is gone with this job: there was no --checkpoints"
            self._log.note("unsaved", text)
        self._checkpoints.wait()
        self._log.note("end", f"{outcome.why}: status {outcome.status}", status=outcome.status)

    def _give_up(self, outcome: Outcome) -> int | None:
        """Notes the end of a run; returns the job's status if it is not to be started again."""
        self._began = outcome.began
        why = self._restarts.note(outcome, self._watch.num_steps)
        what_next = "" if why else ": the job is started again"
        self._log.note("ended", outcome.why + what_next, lost=list(outcome.lost))
        if not why:
            return None
        self._log.note("given_up", f"{why}: the job is given up")
        return outcome.error or 1


class Restarts:
    """Says when a job has been started again often enough: `most` times within an hour, or in vain."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: deque[float] = deque()
        self._num_in_vain = 0
        self._best_step = -1

    def note(self, outcome: Outcome, step: int) -> str:
        """Notes a run that has ended after so many steps; returns why there is to be no other one, empty if there is.

        Runs that were ended from outside say nothing of the job, however little they came to do.
        """
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > _HOUR:
            self._times.popleft()
        self._num_in_vain = 0 if step > self._best_step else self._num_in_vain + bool(outcome.error)
        self._best_step = max(step, self._best_step)
        if len(self._times) > self._most:
            return f"{len(self._times)} starts again within an hour"
        return f"{_NO_PROGRESS} runs failed and came no further" if self._num_in_vain >= _NO_PROGRESS else ""


def _variables_of_plan(deployment: str, is_old: bool) -> dict[str, str]:
    """Returns settings by which plans of other numbers of ranks, or of other speeds, are kept apart."""
    found = {_DEPLOYMENT: deployment} if deployment not in ("", DEFAULT_DEPLOYMENT) else {}
    return found | ({"AUTOVARUNA_LOAD_DEPLOYMENT": "false"} if is_old else {})


def start(options: Options, choose: Callable[[Options], tuple[Options, Grid | None]]) -> int:
    """Runs a job as its options say, once or for as long as there are hosts, and returns its status."""
    chosen, grid = choose(options)  # refuses first what no number of hosts could run
    if options.morphing is None:
        return Job(chosen, grid).run()
    try:
        return Manager(options, choose).run()
    except KeyboardInterrupt:
        show(sys.stderr, "autovaruna: interrupted; the job has been ended\n")
        return 128 + signal.SIGINT
