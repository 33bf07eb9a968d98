"""Defines `Manager`: starts a job, and starts it again on the hosts that there are, from the newest state they have.

One mpirun never outlives one of its hosts, so there is one mechanism for whatever happens: end the job, at a step's
border if there is time, or find it ended; find the newest state that the hosts have whole; start the job on what is
there. A job has finished only when every rank has said so.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from autovaruna.elastic.events import EventLog
from autovaruna.elastic.job import LOST_OTHERS, Grid, Job, handling
from autovaruna.elastic.keeper import SOCKET
from autovaruna.elastic.link import Link, answers, job_folder
from autovaruna.elastic.notices import Notices
from autovaruna.elastic.options import Options, is_this_machine, list_hosts
from autovaruna.elastic.slow_hosts import SlowHosts
from autovaruna.elastic.snapshots import State, find_state, hand_out
from autovaruna.elastic.watch import Watch
from autovaruna.errors import ConfigError
from autovaruna.runtime.progress import JobPlace

LEFT = 75
"""What a rank ends with that has left at a step's border."""
_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_REOPEN_SECONDS = 6.0
_AGAIN_SECONDS = 5.0
"""How long after a keeper has gone it is tried again, doubled each time up to a minute."""
_LEAVE_SECONDS = 120.0
_DEPLOYMENT = "AUTOVARUNA_DEPLOYMENT_FILE"
_HOUR = 3600.0
_NO_PROGRESS = 3
"""How often in a row the job is started again without having come any further."""


@dataclass
class Outcome:
    """How a run of the job has ended.

    Attributes:
        why: in words.
        status: what the whole job ends with; None: it goes on.
        error: what a rank's script has ended with, if it was that.
        lost: hosts that do not answer any more.
        is_fault: whether something has failed, in contrast to what was asked for.
        began: when it was noticed, on the monotonic clock, seconds.
    """

    why: str
    status: int | None = None
    error: int = 1
    lost: tuple[str, ...] = ()
    is_fault: bool = True
    began: float = field(default_factory=time.monotonic)


class Manager:
    """Looks after one job from its first start to its end.

    Args:
        options: What the user asked for, `morphing` included.
        choose: Returns options with stages and micro-batch size for some hosts, and the ranks of each stage.

    Raises:
        ConfigError: mpirun is missing, or a host cannot be used.
    """

    def __init__(self, options: Options, choose: Callable[[Options], tuple[Options, Grid | None]]) -> None:
        assert options.morphing is not None
        self._options = options
        self._ways = options.morphing
        self._choose = choose
        self._log = EventLog(self._ways.events)
        self._token = secrets.token_hex(32)
        self._notices = Notices(self._notice)
        self._folder = job_folder(self._ways.memory, secrets.token_hex(4))
        self._listed = dict(options.hosts)
        self._links: dict[str, Link] = {}
        self._delays: dict[str, float] = {}
        self._noticed: dict[str, float] = {}
        self._slow = SlowHosts(self._log, self._ways.slow_factor)
        self._attempt = 0
        self._starts: deque[float] = deque()
        self._num_in_vain = 0
        self._best_step = -1
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._signals: list[signal.Signals] = []
        self._first_signal = 0.0
        self._job: Job | None = None
        self._began = time.monotonic()
        self._machine_time = _time_of(self._ways.machine_list)
        self._last_look = 0.0
        self._lost: set[str] = set()
        self._begun: list[Link] = []
        self._watch = Watch(0)
        self._last_save = time.monotonic()
        self._saving: threading.Thread | None = None
        self._saved_step = -1

    def run(self) -> int:
        """Runs the job to its end and returns its status."""
        with handling(self._hear), self._notices:
            try:
                self._greet()
                while True:
                    outcome = self._run_once()
                    if outcome.status is not None:
                        self._note_end(outcome)
                        return outcome.status
                    if (status := self._give_up(outcome)) is not None:
                        return status
            finally:
                self._quit()

    # hosts

    def _greet(self) -> None:
        """Starts the keepers and waits until each is up, or has failed.

        Raises:
            ConfigError: none can be started.
        """
        for host in self._listed:
            self._open(host)
        deadline = time.monotonic() + _START_SECONDS
        while any(not link.is_ready and not link.is_gone for link in self._links.values()):
            self._end_if_asked()
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        failed = {host: link.words for host, link in self._links.items() if not link.is_up}
        if (failed and self._num_ranks(self._usable()) < self._ways.min_ranks) or len(failed) == len(self._listed):
            words = "; ".join(f"{host}: {text or 'it does not answer'}" for host, text in failed.items())
            raise ConfigError(
                f"no keeper can be started on {', '.join(failed)} ({words}). Expected machines that ssh reaches "
                f"without a password, each with {sys.executable} and a folder {self._ways.memory} to write to"
            )
        for host, text in failed.items():
            self._log.note("unreachable", f"host {host} cannot be used: {text or 'it does not answer'}", host=host)

    def _open(self, host: str) -> None:
        settings = {"folder": str(self._folder), "token": self._token, "standby": self._ways.has_standby}
        if is_this_machine(host):
            settings["file"] = str(self._notices.path)
        self._links[host] = Link(host, settings)

    def _usable(self) -> dict[str, int]:
        """Returns the hosts that the job can run on now, with their ranks."""
        return {
            host: count
            for host, count in self._listed.items()
            if host in self._links and self._links[host].is_up and not self._links[host].is_silent
            if host not in self._noticed and not self._slow.leaves_out(host)
        }

    def _num_ranks(self, hosts: Mapping[str, int]) -> int:
        return sum(hosts.values())

    def _look_around(self) -> None:
        """Reads the machine list if it has changed, and tries hosts again whose keepers have gone. Never waits."""
        now = time.monotonic()
        if now - self._last_look < _BEAT_SECONDS:
            return
        self._last_look = now
        self._read_list()
        for host in self._listed:
            link = self._links.get(host)
            if link is None:
                self._open(host)
            elif link.is_gone:
                delay = self._delays.get(host, 0.0)
                if now - link.began > delay:
                    self._delays[host] = min(60.0, max(_AGAIN_SECONDS, 2 * delay))
                    self._open(host)
            elif link.is_up:
                self._delays.pop(host, None)
            elif now - link.began > _START_SECONDS:
                link.cut()

    def _read_list(self) -> None:
        changed = _time_of(self._ways.machine_list)
        if self._ways.discover_hosts is None and changed == self._machine_time:
            return
        self._machine_time = changed
        try:
            listed = list_hosts(self._ways.machine_list, self._ways.gpus_per_node, self._ways.discover_hosts)
        except ConfigError as error:
            self._log.note("list", f"the machine list is left as it was: {error}")
            return
        if self._ways.discover_hosts is None or listed != self._listed:
            for host in listed:  # whoever lists a host again wants it back
                self._noticed.pop(host, None)
                self._slow.forgive(host)
        if listed == self._listed:
            return
        for host in sorted(listed.keys() ^ self._listed.keys()):
            was = "added to" if host in listed else "taken from"
            self._log.note("list", f"host {host} was {was} the machine list", host=host)
        self._listed = listed

    def _let_go(self, hosts: Iterable[str]) -> None:
        """Ends the keepers of hosts that are not in the list any more; the job is on others, which have its state."""
        for host in self._links.keys() - self._listed.keys() - set(hosts):
            self._links.pop(host).quit()

    def _take_reports(self, hosts: Iterable[str]) -> None:
        """Takes what keepers have said; a host whose keeper is silent is lost."""
        for host in hosts:
            link = self._links.get(host)
            if link is None:
                continue
            if link.is_silent:
                if host not in self._lost:
                    self._log.note("lost", f"host {host} does not answer any more", host=host)
                self._lost.add(host)
                continue
            if link.is_gone and host not in self._delays:  # as where it alone was killed: a new one goes on
                self._delays[host] = _AGAIN_SECONDS
                self._open(host)
                continue
            self._watch.take(host, link.report)
        self._slow.take(self._watch)

    # one run of the job

    def _run_once(self) -> Outcome:
        """Starts the job on what is there, and returns how it ended."""
        hosts = self._wait_for_hosts()
        began = time.monotonic()
        links = [self._links[host] for host in hosts]
        try:
            state = self._put_state(links)
        except (OSError, FutureTimeoutError) as error:  # a host was lost meanwhile
            return Outcome(f"no state could be handed out: {error}")
        seconds = {"state": time.monotonic() - began}
        self._attempt += 1
        options, grid = self._choose(replace(self._options, hosts=hosts))
        options = replace(options, variables={**self._variables_of_plan(hosts), **options.variables})
        if state is not None:
            options = replace(options, resume_step=state.step)
        self._watch = Watch(self._attempt, self._watch.longest_seconds)
        self._lost.clear()
        step, checkpoints = None if state is None else state.step, self._ways.checkpoints
        place = JobPlace(str(self._folder), self._attempt, len(hosts), step, checkpoints)
        self._begin(links)
        standby = str(self._folder / SOCKET) if self._ways.has_standby else ""
        self._ended = queue.SimpleQueue()
        self._job = Job(options, grid, place, standby, lambda rank, status: self._ended.put((rank, status)))
        self._job.start()
        self._say_start(hosts, state, self._job.num_ranks)
        outcome = self._follow(self._job, hosts, seconds)
        self._end_run(self._job, [link for link in links if link.host not in outcome.lost])
        return outcome

    def _variables_of_plan(self, hosts: Mapping[str, int]) -> dict[str, str]:
        """Returns settings by which the plans of other numbers of ranks do not take each other's place."""
        found = {"AUTOVARUNA_LOAD_DEPLOYMENT": "false"} if self._slow.take_wish() else {}
        if hosts != self._options.hosts and _DEPLOYMENT not in os.environ:
            found[_DEPLOYMENT] = f"deployment-{'-'.join(map(str, hosts.values()))}.json"
        return found

    def _wait_for_hosts(self) -> dict[str, int]:
        """Returns the hosts to run on, once there are enough."""
        has_told = False
        while self._num_ranks(hosts := self._usable()) < self._ways.min_ranks or not hosts:
            self._end_if_asked()
            if not has_told and time.monotonic() - self._began > _BEAT_SECONDS:
                has_told = True
                self._log.note(
                    "waiting", f"{self._num_ranks(hosts)} ranks of at least {self._ways.min_ranks}: waiting for hosts"
                )
            self._look_around()
            time.sleep(_LOOK_SECONDS)
        return hosts

    def _put_state(self, links: list[Link]) -> State | None:
        """Gives the hosts the newest state that there is; None: there is none in memory."""
        up = {host: link for host, link in self._links.items() if link.is_up and not link.is_silent}
        if not self._attempt:
            return None
        state = find_state(list(up.values()))
        if state is not None:
            hand_out(state, links, up)
        return state

    def _begin(self, links: list[Link]) -> None:
        """Tells the keepers of the run that begins, and each where copies of its ranks' parts go."""
        asked = {}
        for place, link in enumerate(links):
            buddy = links[(place + 1) % len(links)]
            to = None if buddy is link else [buddy.address, buddy.port]
            asked[link.host] = link.ask("begin", number=self._attempt, buddy=to)
        answers(asked, _END_SECONDS)
        self._begun = links

    def _begin_anew(self, hosts: dict[str, int]) -> None:
        """Tells all keepers again if one of them has been started anew, which the others would not find."""
        links = [self._links[host] for host in hosts if host in self._links]
        if links != self._begun and len(links) == len(hosts) and all(link.is_up for link in links):
            self._begin(links)

    def _say_start(self, hosts: dict[str, int], state: State | None, num_ranks: int) -> None:
        where = f"{num_ranks} ranks on {', '.join(hosts)}"
        if state is None:
            self._log.note("start", f"start on {where}", hosts=list(hosts), ranks=num_ranks)
            return
        self._log.note(
            "start",
            f"goes on from step {state.step}, in memory of {', '.join(state.hosts)}: {where}",
            **{"hosts": list(hosts), "ranks": num_ranks, "step": state.step, "from": state.hosts},
        )

    def _follow(self, job: Job, hosts: dict[str, int], seconds: dict[str, float]) -> Outcome:
        """Returns how a run ends, as soon as that is known."""
        started = time.monotonic()
        has_dropped = has_stepped = False
        leaving: Outcome | None = None
        deadline = 0.0
        while True:
            self._look_around()
            self._take_reports(hosts)
            self._begin_anew(hosts)
            if (outcome := self._fault(job, hosts, leaving)) is not None:
                return outcome
            if not has_stepped and self._watch.num_steps > (job.options.resume_step or 0):
                has_stepped = True
                seconds["first_step"] = time.monotonic() - started
                self._log.note("running", f"training, {time.monotonic() - self._began:.1f} s after", seconds=seconds)
            if not has_dropped and self._watch.holds_state(hosts):
                has_dropped = True
                self._ask(hosts, "drop", before=self._attempt)
            if has_dropped:
                self._let_go(hosts)
            self._save_if_due(hosts)
            if leaving is None and (leaving := self._reason_to_leave(hosts)) is not None:
                deadline = time.monotonic() + self._patience()
                self._take_now(hosts)
                if not self._watch.can_leave:
                    return leaving
                self._ask(hosts, "leave")
            if leaving is not None and time.monotonic() > deadline:
                return leaving
            time.sleep(_LOOK_SECONDS)

    def _fault(self, job: Job, hosts: dict[str, int], leaving: Outcome | None) -> Outcome | None:
        """Returns how the run has ended, or must end; None: it goes on."""
        while not self._ended.empty():
            rank, status = self._ended.get()
            if status == 0:
                continue
            if status == LEFT or leaving is not None:
                return leaving or self._leaves_by_itself()
            lost = self._take_now(hosts)
            return self._or_lost(lost, self._by_rank(job, rank, status))
        if not job.is_running:
            status = job.wait()
            lost = self._take_now(hosts)
            if status == 0 and not self._watch.hosts_that_hear:
                return Outcome("the job has finished", 0, is_fault=False)
            if leaving is not None or self._watch.hosts_that_hear:
                return leaving or self._leaves_by_itself()
            why = f"mpirun ended with status {status} before every rank had finished"
            return self._or_lost(lost, Outcome(why) if job.output.has_started else Outcome(why, status or 1))
        if lost := [host for host in hosts if self._is_lost(host)]:
            return Outcome(f"host {', '.join(lost)} was lost", lost=tuple(lost))
        if (hang := self._watch.hang()) is not None:
            return Outcome(f"no progress for {hang.seconds:.0f} s: {hang.words}")
        return None

    def _is_lost(self, host: str) -> bool:
        """Says whether a host of the run is gone; one whose keeper alone has gone gets a new one, and goes on."""
        link = self._links.get(host)
        if link is None or host in self._lost:
            return True
        is_late = not link.is_up and time.monotonic() - link.began > _REOPEN_SECONDS
        return is_late or (link.is_gone and host in self._delays)

    def _or_lost(self, lost: Sequence[str], outcome: Outcome) -> Outcome:
        """Returns the outcome, or that hosts were lost, if any does not answer: what ranks said follows from it."""
        if not lost:
            return outcome
        for host in lost:
            if (link := self._links.get(host)) is not None:
                link.cut()
        return Outcome(f"host {', '.join(lost)} was lost", lost=tuple(lost), began=outcome.began)

    def _take_now(self, hosts: Iterable[str]) -> list[str]:
        """Takes what keepers say of their ranks now; returns the hosts that do not answer."""
        reports = answers(self._ask(hosts, "ping"), _BEAT_SECONDS)
        for host, report in reports.items():
            self._watch.take(host, report)
        return sorted(set(hosts) - reports.keys())

    def _ask(self, hosts: Iterable[str], do: str, **arguments: Any) -> dict[str, Future[Any]]:
        return {host: self._links[host].ask(do, **arguments) for host in hosts if host in self._links}

    def _by_rank(self, job: Job, rank: int, status: int) -> Outcome:
        """Returns the outcome where a rank has ended: for what its script did, or after another one.

        A job that has not come to any step ends with the error of its script.
        """
        if status == LOST_OTHERS:
            first = next(((its, each) for its, each in job.output.ended.items() if each not in (0, status)), None)
            if first is None:
                return Outcome(self._watch.words_of_gone(job.output.ended) or f"rank {rank} has lost other ranks")
            rank, status = first
        if status < 0:
            return Outcome(f"rank {rank} was ended by {signal.Signals(-status).name}")
        why = f"rank {rank} ended with status {status}"
        has_state = self._watch.holds_any or job.options.resume_step != self._options.resume_step
        return Outcome(why, None if has_state else status, error=status)

    def _leaves_by_itself(self) -> Outcome:
        """Returns the outcome where ranks were asked to end by signals that came past the manager."""
        hosts = self._watch.hosts_that_hear
        for host in hosts:
            self._noticed[host] = float("inf")
        if not self._usable():
            self._noticed.clear()  # there is no other host: the job goes on here, as long as it may
        return Outcome(f"a signal asked ranks on {', '.join(hosts) or 'a host'} to end", is_fault=False)

    # what is asked for

    def _reason_to_leave(self, hosts: dict[str, int]) -> Outcome | None:
        """Returns why the job should end at the next border, and go on elsewhere; None: it should not."""
        if self._signals:
            return Outcome(f"{self._signals[0].name} came", LEFT, is_fault=False)
        usable = self._usable()
        if gone := [host for host in hosts if host in self._noticed or host not in self._listed]:
            return Outcome(f"host {', '.join(gone)} is to be left", is_fault=False)
        if slow := [host for host in hosts if self._slow.leaves_out(host)]:
            if any(host not in slow for host in usable):
                return Outcome(f"host {', '.join(slow)} is slow", is_fault=False)
            for host in slow:
                self._slow.forgive(host)
        if self._slow.wants_plan and self._watch.holds_any:
            return Outcome("the plan is made anew, for ranks as fast as they are now", is_fault=False)
        if not self._watch.holds_any:  # all that was done so far would be lost
            return None
        if new := [host for host in usable if host not in hosts and self._links[host].is_ready]:
            return Outcome(f"host {', '.join(new)} is there", is_fault=False)
        if other := [host for host in hosts if usable.get(host, hosts[host]) != hosts[host]]:
            return Outcome(f"host {', '.join(other)} has other numbers of ranks", is_fault=False)
        return None

    def _patience(self) -> float:
        """Returns how long ranks may take to come to a border, seconds."""
        left = [until - time.monotonic() for until in self._noticed.values()]
        return max(0.0, min([*left, _LEAVE_SECONDS]) - 1.0) if left and min(left) < float("inf") else _LEAVE_SECONDS

    def _notice(self, host: str, seconds: float) -> str:
        """Takes a notice that a host will be taken away; returns what becomes of it, in words."""
        known = next((each for each in self._listed if each.rpartition("@")[2] == host), None)
        if known is None:
            return f"{host} is no host of this job; those are {', '.join(self._listed)}"
        self._log.note("notice", f"host {known} goes in {seconds:g} s", host=known, seconds=seconds)
        self._noticed[known] = time.monotonic() + seconds
        return ""

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal; a later one that asks to end ends the job at once."""
        heard, now = signal.Signals(number), time.monotonic()
        is_later = bool(self._signals) and now - self._first_signal > _BEAT_SECONDS  # a scheduler may send several
        self._first_signal = self._first_signal if self._signals else now
        self._signals.append(heard)
        is_hasty = heard in (signal.SIGINT, signal.SIGHUP) or is_later
        if is_hasty and self._job is not None:
            self._job.kill()
        if is_hasty or self._job is None:
            raise KeyboardInterrupt

    def _end_if_asked(self) -> None:
        if self._signals:
            raise KeyboardInterrupt

    # the end of a run, and of the job

    def _end_run(self, job: Job, links: list[Link]) -> None:
        """Ends what is left of a run on every host, at once."""
        job.kill()
        asked = {
            link.host: link.ask("end", number=self._attempt, namespace=job.namespace) for link in links if link.is_up
        }
        answers(asked, _END_SECONDS)
        job.wait() if not job.is_running else None

    def _note_end(self, outcome: Outcome) -> None:
        """Notes the end of the whole job; what was asked to end is on disk first, if there is a folder for it."""
        if self._saving is not None:
            self._saving.join()
        if outcome.status == LEFT and self._ways.checkpoints is not None:
            self._save(self._ways.checkpoints, [link for link in self._links.values() if link.is_up])
        elif outcome.status == LEFT and self._watch.holds_any:
            self._log.note(
                "unsaved",
                f"step {self._watch.num_steps} is gone with this job: there was no --checkpoints",
            )
        self._log.note("end", f"{outcome.why}: status {outcome.status}", status=outcome.status)

    def _give_up(self, outcome: Outcome) -> int | None:
        """Notes the end of a run; returns the job's status if it has been started again too often."""
        self._began = outcome.began
        self._log.note("ended", f"{outcome.why}: the job is started again", lost=list(outcome.lost))
        now = time.monotonic()
        self._starts.append(now)
        while now - self._starts[0] > _HOUR:
            self._starts.popleft()
        step = self._watch.num_steps
        self._num_in_vain = 0 if step > self._best_step or not outcome.is_fault else self._num_in_vain + 1
        self._best_step = max(step, self._best_step)
        if len(self._starts) > self._ways.max_restarts:
            self._log.note("given_up", f"{len(self._starts)} starts again within an hour: the job is given up")
            return 1
        if self._num_in_vain >= _NO_PROGRESS:
            self._log.note("given_up", f"{_NO_PROGRESS} runs in a row came no further: the job is given up")
            return outcome.error
        return None

    def _quit(self) -> None:
        """Ends all that is the job's on every host."""
        if self._job is not None:
            self._job.kill()
            self._end_run(self._job, list(self._links.values()))
        for link in self._links.values():
            link.quit()
        for link in self._links.values():
            link.wait(_END_SECONDS)

    # checkpoints on disk

    def _save_if_due(self, hosts: dict[str, int]) -> None:
        """Has keepers write what they hold to disk, in a thread, while ranks go on."""
        due = time.monotonic() - self._last_save > self._ways.checkpoint_seconds
        is_busy = self._saving is not None and self._saving.is_alive()
        if self._ways.checkpoints is None or is_busy or not due or not self._watch.holds_state(hosts):
            return
        self._last_save = time.monotonic()
        links = [self._links[host] for host in hosts]
        self._saving = threading.Thread(target=self._save, args=(self._ways.checkpoints, links), daemon=True)
        self._saving.start()

    def _save(self, folder: str, links: list[Link]) -> None:
        from autovaruna.elastic.saving import save  # needs torch, which a manager does not otherwise

        try:
            answers({link.host: link.ask("hold", on=True) for link in links}, _END_SECONDS)
            state = find_state(links)
            if state is not None and state.step != self._saved_step:
                path = save(state, {link.host: link for link in links}, folder)
                self._saved_step = state.step
                self._log.note("checkpoint", f"step {state.step} is on disk: {path}", step=state.step, path=str(path))
        except Exception as error:
            self._log.note("checkpoint", f"no checkpoint could be written: {error}")
        finally:
            answers({link.host: link.ask("hold", on=False) for link in links}, _END_SECONDS)


def _time_of(path: str | None) -> int:
    """Returns when a file was last changed; 0: there is none."""
    with suppress(OSError):
        return 0 if path is None else os.stat(path).st_mtime_ns
    return 0


def start(options: Options, choose: Callable[[Options], tuple[Options, Grid | None]]) -> int:
    """Runs a job as its options say, once or for as long as there are hosts, and returns its status."""
    chosen, grid = choose(options)  # refuses first what no number of hosts could run
    if options.morphing is None:
        return Job(chosen, grid).run()
    try:
        return Manager(options, choose).run()
    except KeyboardInterrupt:
        sys.stderr.write("autovaruna: interrupted; the job has been ended\n")
        return 128 + signal.SIGINT
