"""Defines `JobRun`: one run of a job, followed until it has ended, or must.

How it goes on is known from what its ranks, their keepers and mpirun say, and from what is asked for: signals, notices,
the machine list. A run that may go on elsewhere ends at the border between two steps, if its ranks come to one in time.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autovaruna.elastic.host_processes import SILENT_SECONDS
from autovaruna.elastic.hosts import BEAT_SECONDS, END_SECONDS, LOOK_SECONDS, Hosts
from autovaruna.elastic.job import LOST_OTHERS, Grid, MpiJob
from autovaruna.elastic.job_folder import JobPlace
from autovaruna.elastic.job_state import Checkpoints
from autovaruna.elastic.link import answers
from autovaruna.elastic.notices import EventLog
from autovaruna.elastic.options import LaunchOptions
from autovaruna.elastic.rank_script import HELD, SAVED
from autovaruna.elastic.watch import JobWatch

_LEAVE_SECONDS = 120.0
_PAUSE_SECONDS = 5.0  # of this process, in which it could hear nothing
_LONG_SECONDS = 5.0  # copies that take longer are told of
_OUTLIVED_SECONDS = 5.0
"""How long mpirun may go on when all ranks have ended well, as while a process that they left holds their output."""


@dataclass
class Outcome:
    """How a run of the job has ended, and whose fault that was: a rank's (`error`), that of hosts, or nobody's."""

    why: str
    status: int | None = None  # what the whole job ends with; None: it goes on
    error: int = 0  # what a rank has ended with, as the job does if that comes again and again; 0: no rank's doing
    killed: tuple[int, int] | None = None  # the rank that a signal has ended, for whatever reason, and its step
    lost: tuple[str, ...] = ()  # hosts that do not answer any more
    unfit: tuple[str, ...] = ()  # hosts on which no rank can be started
    is_asked: bool = False  # whether the job goes on elsewhere by wish: that is no start in vain
    began: float = field(default_factory=time.monotonic)  # when it was noticed


class JobRun:
    """One run of a job, which has begun when it is made, on `options.hosts`; `watch` gets what the ranks report.

    The other arguments are those of `MpiJob`. `held` is the newest step that was whole whatever host is lost, and of
    which run; at first that of earlier ones, which hosts keep until this one has come as far.
    """

    def __init__(
        self,
        hosts: Hosts,
        options: LaunchOptions,
        grid: Grid | None,
        place: JobPlace,
        watch: JobWatch,
        log: EventLog,
        held: tuple[int, int],
    ) -> None:
        self.watch = watch
        self.held = held
        self._hosts = hosts
        self._own = options.hosts
        self._number = place.attempt
        self._first_step = options.resume_step or 0
        self._has_state = place.step is not None
        self._last_end = 0.0
        self._has_logged_full = False
        self._most_at_risk = 0
        self._asked: signal.Signals | None = None
        self._log = log
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        hosts.lost.clear()
        self.job = MpiJob(options, grid, place, lambda rank, status: self._ended.put((rank, status)))
        hosts.begin(self._own, self._number, self.job.num_ranks)
        self.job.start()
        assert options.morphing is not None
        self._start_seconds = options.morphing.start_seconds
        self._next_look = time.monotonic() + self._start_seconds  # at whether hosts reach each other
        self._deadline = time.monotonic() + self._start_seconds  # of the start, and later of what ranks are asked for

    def follow(
        self, since: float, seconds: dict[str, float], checkpoints: Checkpoints, signals: list[signal.Signals]
    ) -> Outcome:
        """Returns how the run ends; `since` is when the one before ended, `seconds` what the start took, by phase."""
        hosts, started = self._hosts, time.monotonic()
        has_stepped = has_dropped = False
        leaving: Outcome | None = None
        looked = started
        while True:
            pause, looked = time.monotonic() - looked, time.monotonic()
            if pause > _PAUSE_SECONDS and (outcome := self._after_pause(pause)) is not None:
                return outcome
            self.job.wake()
            hosts.poll_hosts()
            hosts.poll_reports(self._own, self.watch)
            hosts.begin_anew(self._own, self._number, self.job.num_ranks)
            hosts.record_copy_faults(self._own)
            if (outcome := self._fault(leaving)) is not None:
                return self._or_apart(outcome)
            if not has_stepped and self.watch.num_steps > self._first_step:
                has_stepped = True
                seconds["first_step"] = time.monotonic() - started
                hosts.slow.record_start(time.monotonic() - since)
                self._log.record("running", f"training, {time.monotonic() - since:.1f} s after", seconds=seconds)
            if (step := self.watch.held_step(self._own)) >= 0:
                self._record_copies(step)
                self.held = max(self.held, (step, self._number))
                due = [host for host in hosts.links if not has_dropped or hosts.keeps_older(host, step)]
                hosts.ask(due, "drop", before=self._number, step=step)
                has_dropped = True
                hosts.release(self._own)
                checkpoints.save_if_due([hosts.links[host] for host in self._own if host in hosts.links])
            if signals and self._asked != signal.SIGTERM:
                self._pass_on(signals)
            if leaving is None and (leaving := self._reason_to_leave()) is not None:
                self._deadline = time.monotonic() + self._patience()
                hosts.ask_reports(self._own, self.watch)
                is_script_asked = self._asked is not None and self.job.output.started and not self.watch.is_kept
                if not self.watch.can_leave and not is_script_asked:
                    return leaving
                if self._asked is None:
                    hosts.ask(self._own, "leave")
            if time.monotonic() > self._deadline:
                if leaving is not None:
                    return leaving
                self._asked = None  # the script has done what it does, and goes on
            time.sleep(LOOK_SECONDS)

    def _after_pause(self, seconds: float) -> Outcome | None:
        """Returns the outcome where the manager stood still for so long that keepers end the ranks; None: it goes on.

        What is late by then is late for that.
        """
        self.watch.skip(seconds)
        self._deadline, self._next_look = self._deadline + seconds, self._next_look + seconds
        if seconds < SILENT_SECONDS - 2 * BEAT_SECONDS or self.job.has_finished:
            return None
        why = f"the manager itself stood still for {seconds:.0f} s, as where it is stopped"
        return Outcome(f"{why}: hosts end their ranks after {SILENT_SECONDS:.0f} s without it")

    def _record_copies(self, step: int) -> None:
        """Records, where a step has just arrived on other hosts that took long, what the loss of one will cost.

        A snapshot waits for the copies of the one before: until its own are there, twice as many steps are done.
        """
        seconds, num_steps = self._hosts.copy_seconds(self._own), self.watch.num_steps - step
        if (step, self._number) > self.held and seconds > _LONG_SECONDS and num_steps > 2 * self._most_at_risk:
            self._most_at_risk = num_steps
            text = (
                f"copies to other hosts take {seconds:.0f} s, with --copy_share of the links: there is a snapshot "
                f"after {num_steps + 1} steps, and a lost host costs up to {2 * num_steps + 1}"
            )
            self._log.record("copies", text, seconds=seconds, steps=2 * num_steps + 1)

    def end(self, hosts: Sequence[str]) -> None:
        """Ends what is left of the run on some hosts, at once."""
        self.job.kill()
        up = [host for host in hosts if host in self._hosts.links and self._hosts.links[host].is_up]
        answers(self._hosts.ask(up, "end", number=self._number, namespace=self.job.namespace), END_SECONDS)
        if not self.job.is_running:
            self.job.wait()

    # how it ends

    def _fault(self, leaving: Outcome | None) -> Outcome | None:
        """Returns how the run has ended, or must end; None: it goes on."""
        status_of_all = None if self.job.is_running else self.job.wait()  # then it is known how each rank has ended
        while not self._ended.empty():
            rank, status = self._ended.get()
            if status == 0:
                self._last_end = time.monotonic()
                continue
            lost = self._hosts.ask_reports(self._own, self.watch)
            is_struck = status in (-signal.SIGKILL, LOST_OTHERS) and not self.watch.signalled_hosts
            if self._asked is not None and (leaving is not None or not is_struck):
                return self._by_signal(status)
            if leaving is not None or (status in (SAVED, HELD) and self.watch.signalled_hosts):
                return leaving or self._left_by_itself()
            return self._or_lost(lost, self._by_rank(rank, status))
        if status_of_all is None and self.job.has_finished and time.monotonic() > self._last_end + _OUTLIVED_SECONDS:
            status_of_all = 0
        if status_of_all is not None:
            return self._by_mpirun(status_of_all, leaving)
        if lost := [host for host in self._own if self._hosts.is_lost(host)]:
            return Outcome(f"host {', '.join(lost)} was lost", lost=tuple(lost))
        if self.job.unstarted_hosts and time.monotonic() > self._deadline:
            return self._not_started(f"not every rank has started within {self._start_seconds:g} s", 1)
        if self.watch.num_steps_here < 2 and time.monotonic() > self._next_look:  # messages may wait for ever
            self._next_look = time.monotonic() + self._start_seconds
            if (apart := self._apart()) is not None:
                return apart
        if (hang := self.watch.hang()) is not None:
            found = Outcome(f"no progress for {hang.seconds:.0f} s: {hang.words}", error=int(not hang.is_from_outside))
            return found if hang.is_from_outside else self._apart() or found
        return None

    def _by_mpirun(self, status: int, leaving: Outcome | None) -> Outcome:
        """Returns the outcome where mpirun has ended, and no rank has said that it failed."""
        lost = self._hosts.ask_reports(self._own, self.watch)
        if status == 0 and (self._asked is not None or not self.watch.signalled_hosts):
            return Outcome("the job has finished", 0)
        if leaving is not None or self.watch.signalled_hosts:
            return leaving or self._left_by_itself()
        if self.job.output.ended and status != 128 + signal.SIGKILL:
            return self._or_lost(lost, self._by_script(_words_of_early(self.job.output.ended), status or 1))
        why = f"mpirun ended with status {status} before every rank had finished"
        if self.job.output.started or status == 128 + signal.SIGKILL or lost:
            return self._or_lost(lost, Outcome(why))
        return self._not_started(why, status or 1)

    def _not_started(self, why: str, status: int) -> Outcome:
        """Returns the outcome where ranks could not be started: the fault of the hosts that others differ from."""
        unfit = self.job.unstarted_hosts
        if not self.job.output.started:  # mpirun starts none before it has reached all hosts
            self.job.kill()
            unfit = set(self._hosts.find_unfit(self._own))
        full = answers(self._hosts.ask(self._own, "full_folder"), END_SECONDS)
        why += "".join(f"; {folder} of {host}, where mpirun writes, is full" for host, folder in full.items() if folder)
        if set() < unfit < set(self._own):
            return Outcome(why, unfit=tuple(sorted(unfit)))
        return Outcome(why, None if self._has_state else status)

    def _by_rank(self, rank: int, status: int) -> Outcome:
        """Returns the outcome where a rank has ended; a script's error ends a job that has come to no step."""
        ended = self.job.output.ended
        early = _words_of_early(ended)
        if status == LOST_OTHERS:
            first = self._first_fault(0, status)
            if first is None:
                gone = self.watch.first_gone(ended)
                if early and not gone:
                    return self._by_script(early, 1)
                return Outcome(gone or f"rank {rank} has lost other ranks")
            rank, status = first
        if status == -signal.SIGTERM:
            rank, status = self._first_fault(0, status, LOST_OTHERS) or (rank, status)
        if status < 0:
            killed = signal.Signals(-status)
            if killed == signal.SIGTERM and early:  # mpirun has sent it
                return self._by_script(early, 1)
            if killed == signal.SIGTERM and self.job.unstarted_hosts:
                return self._not_started("mpirun has ended ranks before all had started", 1)
            if killed == signal.SIGTERM:  # which mpirun sends to all once it ends one
                why = "mpirun, or somebody, has ended ranks by SIGTERM"
                return Outcome(why, error=0 if self._goes_on else 128 + killed)
            why = f"rank {rank} was ended by {killed.name}"
            if killed == signal.SIGKILL and self.watch.is_out_of_memory(rank):
                why += "; the kernel of its host says out of memory"
            return Outcome(why, error=128 + killed, killed=(rank, self.watch.step_of(rank)))
        return self._by_script(f"rank {rank} ended with status {status}", status)

    def _by_script(self, why: str, status: int) -> Outcome:
        """Returns the outcome where the script has ended by itself."""
        return Outcome(why, None if self._goes_on else status, error=status)

    @property
    def _goes_on(self) -> bool:
        """Whether there is a state that another run can go on from."""
        return self.watch.holds_any or self._has_state

    def _first_fault(self, *others: int) -> tuple[int, int] | None:
        """Returns the first rank that has ended with another status than these, and its status; None: none has."""
        return next(((rank, each) for rank, each in self.job.output.ended.items() if each not in others), None)

    def _or_lost(self, lost: Sequence[str], outcome: Outcome) -> Outcome:
        """Returns the outcome, or that hosts were lost, if any does not answer: what ranks did follows from it."""
        if not lost:
            return outcome
        self._hosts.cut(lost)
        return Outcome(f"host {', '.join(lost)} was lost", lost=tuple(lost), began=outcome.began)

    def _or_apart(self, outcome: Outcome) -> Outcome:
        """Returns the outcome, or that hosts do not reach each other, where a run has come to nothing."""
        is_blamed = self._asked is not None or outcome.lost or outcome.unfit or self.watch.refusal
        if is_blamed or outcome.status == 0 or self.watch.num_steps_here > 1:
            return outcome
        return self._apart() or outcome

    def _apart(self) -> Outcome | None:
        """Returns the outcome where hosts do not reach each other; None: they do."""
        others = {*self._hosts.sources} - self._own.keys()  # whose state the run's ranks read
        apart = self._hosts.find_apart([*self._own, *others]) if len(self._own) + len(others) > 1 else {}
        return Outcome("; ".join(apart.values()), unfit=tuple(apart)) if apart else None

    def _left_by_itself(self) -> Outcome:
        """Returns the outcome where ranks were asked to end by signals that came past the manager."""
        hosts = self.watch.signalled_hosts
        self._hosts.leave_if_others_suffice(hosts)
        return Outcome(f"a signal asked ranks on {', '.join(hosts)} to end")

    # what is asked for

    def _pass_on(self, signals: list[signal.Signals]) -> None:
        """Passes a signal on to the ranks, as without a manager; what SIGUSR1 means is theirs to say."""
        self._asked = max(signals)  # SIGTERM rather than SIGUSR1
        if self._asked == signal.SIGUSR1:
            signals.clear()
        self._deadline = time.monotonic() + self._patience()
        self.job.pass_on(self._asked)

    def _by_signal(self, status: int) -> Outcome:
        """Returns the outcome where ranks end for a signal that has come, with the status that the script has chosen.

        Where it has not, its state is in memory of hosts, if anywhere.
        """
        assert self._asked is not None
        if not self.job.is_running:
            self.job.wait()
        every = {status, *self.job.output.ended.values()}
        status = next((each for each in (HELD, SAVED) if each in every), status)
        is_unsaved = status < 0 or status == LOST_OTHERS or (status == SAVED and not self.watch.num_steps_here)
        is_held = is_unsaved and (self._has_state or self.watch.holds_any)
        return Outcome(f"{self._asked.name} came", HELD if is_held else status if status >= 0 else 128 - status)

    def _reason_to_leave(self) -> Outcome | None:
        """Returns why the run should end at the next border, and the job go on elsewhere; None: it should not."""
        if self._asked == signal.SIGTERM or (self._asked is not None and self.watch.signalled_hosts):
            return self._by_signal(-self._asked)
        why = self._unwanted_host() or (self._better_hosts() if self.watch.holds_any else "")
        return Outcome(why, is_asked=True) if why else None

    def _unwanted_host(self) -> str:
        """Says which host of the run is to be left; empty: none."""
        hosts = self._hosts
        hosts.usable()  # slow hosts come back if it needs them
        if gone := [host for host in self._own if host in hosts.noticed or host not in hosts.listed]:
            return f"host {', '.join(gone)} is to be left"
        if full := self.watch.full_hosts:
            why = f"host {', '.join(full)} has no room for snapshots in memory"
            if hosts.can_do_without(full):
                for host in full:
                    hosts.leave_out(host, "it has no room for snapshots in memory")
                return why
            if not self._has_logged_full:
                self._has_logged_full = True
                self._log.record("full", f"{why}, and the job cannot do without: there are none from now on")
        slow = [host for host in self._own if hosts.slow.leaves_out(host)]
        return f"host {', '.join(slow)} is slow" if slow else ""

    def _better_hosts(self) -> str:
        """Says why the job would do better on the hosts of now; empty: it would not."""
        hosts = self._hosts
        if hosts.slow.wants_plan:
            return "the plan is made anew, for ranks as fast as they are now"
        usable = hosts.usable()
        if new := [host for host in usable if host not in self._own and hosts.links[host].is_ready]:
            return f"host {', '.join(new)} is there"
        other = [host for host, count in self._own.items() if usable.get(host, count) != count]
        return f"host {', '.join(other)} has other numbers of ranks" if other else ""

    def _patience(self) -> float:
        """Returns how long ranks may take to come to a border, seconds."""
        left = [until - time.monotonic() for until in list(self._hosts.noticed.values())]  # a thread adds to them
        if not left or min(left) == float("inf"):
            return _LEAVE_SECONDS
        return max(0.0, min([*left, _LEAVE_SECONDS]) - BEAT_SECONDS)


def _words_of_early(ended: Mapping[int, int]) -> str:
    """Says which rank has ended well, where the others have not; empty: none."""
    first = next((rank for rank, status in ended.items() if not status), None)
    return "" if first is None else f"rank {first} ended with status 0 before the others"
