"""Defines `Manager`: starts a job, and starts it again on the hosts that there are, from the newest state they have.

One mpirun never outlives one of its hosts, so there is one mechanism for whatever happens: end the job, at a step's
border if there is time, or find it ended; find the newest state that the hosts have whole; start the job on what is
there. A job has finished only when every rank has said so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from autovaruna.checkpoint.folder import words_of_newest
from autovaruna.elastic.host_processes import SILENT_SECONDS, versions
from autovaruna.elastic.hosts import BEAT_SECONDS, LOOK_SECONDS, Hosts
from autovaruna.elastic.job import Grid, MpiJob, handling, show
from autovaruna.elastic.job_folder import JobPlace, deployment_name
from autovaruna.elastic.job_state import Checkpoints, State, find_state, hand_out
from autovaruna.elastic.notices import EventLog, new_address_file, own_address, pop_dead_manager, receiving_notices
from autovaruna.elastic.options import LaunchOptions
from autovaruna.elastic.rank_script import HELD, SAVED
from autovaruna.elastic.run import JobRun, Outcome
from autovaruna.elastic.standby import LIBRARIES
from autovaruna.elastic.watch import JobWatch
from autovaruna.ranks.tls import Authority

DEFAULT_DEPLOYMENT = "deployment.json"
_DEPLOYMENT = "AUTOVARUNA_DEPLOYMENT_FILE"
_READS = re.compile(rb"""(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\()\s*["'](\w+)["']""")
"""Finds the variables that a script says it reads."""
_HOUR = 3600.0
_MOST_ENDS = 3  # runs that ended in one way and came no further


class Manager:
    """Looks after one job from its first start to its end; ConfigError if it cannot be started.

    `choose` returns options with stages and micro-batch size for some hosts, and the ranks of each stage.
    """

    def __init__(
        self, options: LaunchOptions, choose: Callable[[LaunchOptions], tuple[LaunchOptions, Grid | None]]
    ) -> None:
        assert options.morphing is not None
        self._options = options
        self._morphing = morphing = options.morphing
        self._choose = choose
        self._log = EventLog(morphing.events)
        script = Path(options.script).read_bytes()
        known = pop_dead_manager(job := _name_of(options, script), path := new_address_file())
        self._known = known = None if morphing.forget_memory else known
        authority = Authority(known.key if known else "")
        folder = known.folder if known else f"autovaruna-{os.getuid()}-{secrets.token_hex(4)}"
        self._folder = Path(morphing.memory, folder)
        self._path, self._authority = path, authority
        self._own = own_address(authority, job, folder, known.attempt if known else 0, _asked_of(options))
        settings: dict[str, Any] = {"folder": str(self._folder), "standby": morphing.has_standby}
        settings["copy_share"] = morphing.copy_share
        settings |= {"keep_seconds": morphing.keep_seconds, "versions": versions()}
        settings["files"] = [str(options.code_dir), options.script]
        settings["libraries"] = [name for name in LIBRARIES if name.encode() in script]
        self._hosts = Hosts(options.hosts, morphing, settings, authority, path, self._log)
        self._hosts.check = lambda listed: choose(replace(options, hosts=listed))
        self._checkpoints = Checkpoints(morphing.checkpoints, morphing.checkpoint_seconds, self._log)
        self._run: JobRun | None = None
        self._tried = set[str]()  # hosts on which the job has come to a step
        self._watch = JobWatch(0)
        self._held = self._gone = -1, 0  # the newest step that was whole, and of which run; the same if it is lost
        self._began = time.monotonic()
        self._restarts = Restarts(self._morphing.max_restarts)
        self._has_logged_resume = False
        self._signals: list[signal.Signals] = []
        self._first_signal = 0.0

    def run(self) -> int:
        """Runs the job to its end and returns its status."""
        path = self._path
        notices = receiving_notices(path, self._hosts.notice, self._authority, self._own)
        with ExitStack() as after, handling(self._record_signal), notices as self._own:
            if not path.exists():
                text = f"{path} cannot be written: `notify` does not find this job, nor does a manager that follows it"
                self._log.record("unreachable", text)
            has_hosts, kept = False, None
            try:
                while True:
                    try:
                        if not has_hosts:
                            self._hosts.start(self._raise_if_signalled)
                            self._take_up()
                            has_hosts = True
                        outcome = self._run_once()
                    except _EndedBySignal:
                        came = max(self._signals)
                        if self._run is not None:
                            self._run.end(list(self._hosts.links))
                        unsaved = SAVED if came == signal.SIGUSR1 else 128 + came
                        is_held = self._run is not None and came != signal.SIGINT
                        outcome = Outcome(f"{came.name} came", HELD if is_held else unsaved)
                    status = self._give_up(outcome) if outcome.status is None else outcome.status
                    if status is not None:
                        return self._end(outcome, status)
            except Exception:  # of whatever kind: what hosts hold is not to be lost by it
                kept = self._own
                if self._run is not None:
                    self._save()
                raise
            finally:
                if self._run is None:
                    kept = self._known
                else:
                    self._run.end(list(self._hosts.links))
                if kept is not None:
                    self._record_kept()
                    after.callback(replace(self._own, asked=kept.asked).write, path)  # for the next manager
                self._hosts.close(keeps=kept is not None)

    def _take_up(self) -> None:
        """Finds out what hosts hold of an earlier manager's runs, and which may: nothing newer is to be forgotten."""
        up, known = self._hosts.up(), self._known
        self._watch = JobWatch(max([known.attempt if known else 0, *(link.attempt for link in up.values())]))
        self._held = max([self._held, *(link.held for link in up.values())])
        is_recent = known and known.silent_seconds < self._morphing.keep_seconds + 2 * SILENT_SECONDS
        if self._watch.attempt and is_recent and self._held[0] < 0 and self._hosts.links.keys() - up.keys():
            self._held = 0, 0  # some step of those that do not answer

    def _record_kept(self) -> None:
        """Says what is left as it was by a start that has come to nothing, or a manager that cannot go on."""
        step, _ = held = max((link.held for link in self._hosts.links.values()), default=(-1, 0))
        hosts = [host for host, link in self._hosts.links.items() if link.held == held]
        if self._run is not None:
            (step, _), hosts = self._run.held, list(self._hosts.up())
        what = f"step {step} stays in memory of {', '.join(hosts)}" if step >= 0 else "what hosts have in memory stays"
        text = f"{what} for {self._morphing.keep_seconds:g} s: the same command goes on from it"
        self._log.record("kept", text, step=step)

    # a start

    def _run_once(self) -> Outcome:
        """Starts the job on what is there, and returns how it ended."""
        self._wait_for_hosts(self._restarts.delay_seconds)
        began = time.monotonic()
        names, state = self._put_state()
        seconds = {"state": time.monotonic() - began}
        options, grid = self._choose(replace(self._options, hosts=names))
        deployment = self._deployment(names)
        is_old = self._hosts.slow.begin(names)
        variables = {"AUTOVARUNA_LOAD_DEPLOYMENT": "false"} if is_old else {}
        if deployment not in ("", DEFAULT_DEPLOYMENT):
            variables[_DEPLOYMENT] = deployment
        options = replace(options, variables={**variables, **options.variables})
        if state is not None:
            options = replace(options, resume_step=state.step)
        self._own = replace(self._own, attempt=self._watch.attempt + 1)
        self._own.write(self._path)
        factors = self._hosts.slow.factors()
        self._watch = JobWatch(self._watch.attempt + 1, self._watch, factors)
        place = JobPlace(
            folder=str(self._folder),
            attempt=self._watch.attempt,
            num_hosts=len(names),
            step=None if state is None else state.step,
            checkpoints=self._morphing.checkpoints,
            deployment=deployment,
            factors=factors,
        )
        self._run = run = JobRun(self._hosts, options, grid, place, self._watch, self._log, self._held)
        self._record_start(names, state, run.job.num_ranks)
        outcome = run.follow(self._began, seconds, self._checkpoints, self._signals)
        self._held = run.held
        run.end([host for host in names if host not in outcome.lost])
        if run.watch.num_steps > (options.resume_step or 0):
            self._tried = (self._tried | names.keys()) - set(outcome.lost)
        elif outcome.error and not outcome.killed and not run.watch.refusal and (unfit := self._suspects(names)):
            return replace(outcome, unfit=unfit, status=None)
        if state is not None and not outcome.lost and (words := run.watch.refusal):
            return self._put_aside(state, outcome, words)
        return outcome

    def _suspects(self, names: Collection[str]) -> tuple[str, ...]:
        """Returns the hosts without which the script may not fail, if the others suffice.

        They cannot import what ranks do; or the job has come to no step on them yet, but has on others.
        """
        broken = sorted(host for host in names if self._hosts.standby_fault(host))
        found = broken or (sorted(set(names) - self._tried) if self._tried else [])
        return tuple(found) if self._hosts.can_do_without(found) else ()

    def _put_aside(self, state: State, outcome: Outcome, words: str) -> Outcome:
        """Returns the outcome of a run that could not load its state: the next older one is taken."""
        self._checkpoints.aside.add(state.key)
        self._gone = self._held
        where = f"the state of step {state.step} in memory of {', '.join(state.hosts)}"
        self._log.record("put_aside", f"{where} cannot be loaded, and is put aside: {words}", step=state.step)
        return replace(outcome, status=None, error=0, killed=None)

    def _wait_for_hosts(self, seconds: float = 0.0) -> dict[str, int]:
        """Returns the hosts to run on, once there are enough, and some seconds have passed."""
        has_logged, least, until = False, self._morphing.min_ranks, time.monotonic() + seconds
        while (there := sum((names := self._hosts.usable()).values())) < least or time.monotonic() < until:
            self._raise_if_signalled()
            if there < least and not has_logged and time.monotonic() - self._began > BEAT_SECONDS:
                has_logged = True
                self._log.record("waiting", f"{there} ranks of at least {least}: waiting for hosts")
            self._hosts.poll_hosts()
            time.sleep(LOOK_SECONDS)
        return names

    def _put_state(self) -> tuple[dict[str, int], State | None]:
        """Returns hosts to run on that have got the newest state that there is; None: there is none in memory."""
        while True:
            state = self._find_state() if self._watch.attempt else None
            names = self._wait_for_hosts()
            self._hosts.sources = [] if state is None else state.hosts
            if self._hosts.unreached:  # or were, when they were last asked
                self._hosts.find_apart({*names, *self._hosts.sources})
            failed = {} if state is None else hand_out(state, names, self._hosts.links, self._hosts.unreached)
            if not failed:
                return names, state
            for host in failed.keys() & self._hosts.up().keys():
                self._hosts.leave_out(host, f"it cannot take a state: {failed[host]}")

    def _find_state(self) -> State | None:
        """Returns the newest state that there is; hosts that may have a newer one are waited for, for a while."""
        deadline, has_logged = time.monotonic() + self._morphing.state_wait_seconds, False
        while True:
            up = self._hosts.up()
            state = find_state(list(up.values()), aside=self._checkpoints.aside)
            missing = sorted(self._hosts.links.keys() - up.keys())
            if self._gone == self._held or (state is not None and state.step >= self._held[0]):
                return state
            if is_over := not missing or time.monotonic() > deadline:
                self._gone = self._held
            if is_over or not has_logged:
                has_logged, seconds = True, self._morphing.state_wait_seconds
                what = "going back" if is_over else f"waiting for {', '.join(missing)}, {seconds:g} s at most"
                self._log.record("waiting", f"step {self._held[0]} is not whole on the hosts that answer: {what}")
            self._raise_if_signalled()
            self._hosts.poll_hosts()
            time.sleep(BEAT_SECONDS)

    def _deployment(self, names: Mapping[str, int]) -> str:
        """Returns the file of the plan for some hosts; empty: the user has named one, whatever the hosts are."""
        if _DEPLOYMENT in os.environ or _DEPLOYMENT in self._options.variables:
            return ""
        return DEFAULT_DEPLOYMENT if names == self._options.hosts else deployment_name(names.values())

    def _record_start(self, names: Mapping[str, int], state: State | None, num_ranks: int) -> None:
        where = f"{num_ranks} ranks on {', '.join(names)}"
        text, details = f"start on {where}", dict[str, Any](hosts=list(names), ranks=num_ranks)
        if state is not None:
            text = (
                f"goes on from step {state.step}, in memory of {', '.join(state.hosts)} for {state.age_seconds:.0f} s"
            )
            asked, before = self._own.asked, self._known.asked if self._known else {}
            others = [f"{name} is {asked[name]}, was {its}" for name, its in before.items() if asked.get(name) != its]
            text, self._known = "; ".join([text, *others]) + f": {where}", None
            details |= {"step": state.step, "from": state.hosts}
        self._log.record("start", text, **details)

    # signals

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        """Records a signal; a second one that asks to end ends the job at once."""
        heard, now = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number), time.monotonic()
        is_later = bool(self._signals) and now - self._first_signal > BEAT_SECONDS  # a scheduler may send several
        if heard == signal.SIGINT and self._signals.count(heard) and not is_later:
            return
        self._first_signal = self._first_signal if self._signals else now
        self._signals.append(heard)
        is_hasty = heard == signal.SIGINT or is_later
        if is_hasty and self._run is not None:
            self._run.job.kill()
        if is_later:
            raise KeyboardInterrupt
        if self._run is None or is_hasty:
            raise _EndedBySignal

    def _raise_if_signalled(self) -> None:
        if self._signals:
            raise _EndedBySignal

    # an end

    def _end(self, outcome: Outcome, status: int) -> int:
        """Returns what the whole job ends with: `SAVED` for what hosts held in memory only once that is on disk."""
        folder, fault = self._morphing.checkpoints, self._save(is_whole=not status)
        if status == HELD:
            status = 1 if fault else SAVED
            if fault:
                text = f"step {self._watch.num_steps} is gone with this job: {fault}"
                if folder is not None:
                    text += f". {words_of_newest(folder)}"
                self._log.record("unsaved", text)
        self._log.record("end", f"{outcome.why}: status {status}", status=status)
        return status

    def _save(self, is_whole: bool = False) -> str:
        """Waits for the disk to take what hosts hold, unless all `is_whole`; returns why that failed, empty if not."""
        if self._morphing.checkpoints is None:
            return "there was no --checkpoints"
        links = None if is_whole else list(self._hosts.up().values())
        return self._checkpoints.finish(links, self._morphing.end_wait_seconds)

    def _give_up(self, outcome: Outcome) -> int | None:
        """Records the end of a run; returns the job's status if it is not to be started again."""
        self._began = outcome.began
        why = self._restarts.record(outcome, self._watch.num_steps)
        what_next = "" if why else ": the job is started again"
        self._log.record("ended", outcome.why + what_next, lost=list(outcome.lost))
        for host in outcome.unfit:
            self._hosts.leave_out(host, f"the job cannot be started with it: {outcome.why}")
        if not (why or self._has_logged_resume or self._watch.is_kept or not self._watch.num_steps_here):
            self._has_logged_resume = True
            text = "it has not called model.resume(), with which it would go on where it was"
            self._log.record("from_start", f"the script is run again from its start: {text}")
        if not why:
            return None
        self._log.record("given_up", f"{why}: the job is given up")
        return outcome.error or 1


class _EndedBySignal(KeyboardInterrupt):
    """A signal has asked the job to end while none of its ranks runs, or at once."""


class Restarts:
    """Says when a job has been started again often enough: `most` times within an hour, or in vain.

    In vain are three runs without any that came further where their script failed, or the same rank was killed at the
    same step. Where hosts were lost, or could not start ranks, the job has no fault.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: deque[float] = deque()
        self._ends = Counter[tuple[int, int] | None]()
        self._num_in_vain = 0
        self._best_step = -1

    @property
    def delay_seconds(self) -> float:
        """How long to wait before the next run: doubled for each run in a row that came no further."""
        return min(60.0, 2.0 ** (self._num_in_vain - 3)) if self._num_in_vain > 2 else 0.0

    def record(self, outcome: Outcome, step: int) -> str:
        """Records the end of a run after so many steps; returns why there is no other one, empty if there is."""
        is_further, self._best_step = step > self._best_step, max(step, self._best_step)
        self._num_in_vain = 0 if is_further else self._num_in_vain + 1
        if is_further:
            self._ends.clear()
        if outcome.unfit or outcome.lost or outcome.is_asked:
            return ""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > _HOUR:
            self._times.popleft()
        self._ends[outcome.killed] += bool(outcome.error)
        if self._ends[outcome.killed] >= _MOST_ENDS:
            return _words_of_ends(outcome, self._best_step)
        if len(self._times) > self._most:
            return f"{len(self._times)} starts again within an hour"
        return ""


def _words_of_ends(outcome: Outcome, step: int) -> str:
    """Says how runs have ended again and again."""
    if outcome.killed is None:
        return f"three runs failed and came no further than step {step}: {outcome.why}"
    rank, its_step = outcome.killed
    name, about = signal.Signals(outcome.error - 128).name, "".join(outcome.why.partition("; ")[1:])
    return f"rank {rank} was killed three times at step {its_step} ({name}){about}"


def _name_of(options: LaunchOptions, script: bytes) -> str:
    """Returns a name of a job, which a manager that is started again finds it by: all that the script is given."""
    assert options.morphing is not None
    digest, given = hashlib.sha256(script).hexdigest(), {**os.environ, **options.variables}
    names = {name.decode() for name in _READS.findall(script)} | options.variables.keys()
    words: list[Any] = [str(options.code_dir), options.script, digest, options.arguments, options.resume_step]
    words += [options.morphing.job, {name: given.get(name) for name in sorted(names)}]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _asked_of(options: LaunchOptions) -> dict[str, str]:
    """Returns what a job may be given otherwise when it goes on, each in words."""
    names = "batch_size", "num_stages", "chunk_size", "num_ranks"
    return {name: str(getattr(options, name)) for name in names}


def start(options: LaunchOptions, choose: Callable[[LaunchOptions], tuple[LaunchOptions, Grid | None]]) -> int:
    """Runs a job as its options say, once or for as long as there are hosts, and returns its status."""
    chosen, grid = choose(options)  # refuses first what no number of hosts could run
    try:
        return MpiJob(chosen, grid).run() if options.morphing is None else Manager(options, choose).run()
    except KeyboardInterrupt:
        show(sys.stderr, "autovaruna: interrupted; the job has been ended\n")
        return 128 + signal.SIGINT
