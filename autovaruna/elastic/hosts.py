"""Defines `Hosts`: the hosts of a job with their keepers, which of them can be used, and which are too slow for it."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autovaruna.elastic.job import Probe
from autovaruna.elastic.link import Link, answers
from autovaruna.elastic.notices import EventLog
from autovaruna.elastic.options import MorphingOptions, is_this_machine, list_hosts
from autovaruna.elastic.watch import JobWatch, Place, Slow
from autovaruna.errors import ConfigError

BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.05
END_SECONDS = 10.0  # how long a keeper may take to do what it is asked for
_REOPEN_SECONDS = 6.0
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 5.0, 10.0  # how long after a keeper has gone it is tried again
_FAILED_SECONDS = 10.0  # how long a host is left out that has failed, doubled each time
SLOW_FILE = "slow_machines.out"  # gets the hosts that are left out, a name a line, as Varuna writes it
_BETWEEN_SECONDS = 120.0  # the least time between two plans that are made anew for the sake of speeds
_LASTING_SECONDS = 10.0  # what is slow for less than a restart takes is not worth one
_QUIET_SECONDS = 60.0  # how long nothing more is printed of a rank that is slow from time to time; the events have all
_LEFT_OUT_SECONDS = 600.0
"""After so long a host that was left out is tried again; doubled each time that it is still slow."""


class Hosts:
    """The hosts of a job; `settings` is each keeper's first line, `own_file` what this machine's removes too.

    Attributes:
        listed: ranks of each host in the machine list.
        links: the keepers, by host.
        noticed: hosts that are to be left, with when they go, on the monotonic clock, seconds.
        lost: hosts of the run that do not answer any more.
        slow: those that are left out because they are slow.
    """

    def __init__(
        self,
        listed: Mapping[str, int],
        ways: MorphingOptions,
        settings: Mapping[str, Any],
        own_file: Path,
        log: EventLog,
    ) -> None:
        self.listed = dict(listed)
        self.links: dict[str, Link] = {}
        self.noticed: dict[str, float] = {}
        self.lost: set[str] = set()
        self.slow = SlowHosts(log, ways.slow_factor)
        self._ways = ways
        self._settings = settings
        self._own_file = own_file
        self._log = log
        self._delays: dict[str, float] = {}
        self._left_out: dict[str, float] = {}  # until when hosts are, that have failed
        self._failed: dict[str, float] = {}  # for how long each was left out last
        self._probes: dict[str, Probe] = {}
        self._begun: list[Link] = []
        self._machine_time = _time_of(ways.machine_list)
        self._times_of_notices: dict[str, int] = {}
        self._last_look = 0.0
        self._reading: Future[dict[str, int]] | None = None
        self._fault_of_list = ""

    def start(self, check: Callable[[], None]) -> None:
        """Starts the keepers and calls `check` until each is up, or has failed; ConfigError if too few can start."""
        for host in self.listed:
            self._open(host)
        deadline = time.monotonic() + self._ways.start_seconds
        while any(not link.is_ready and not link.is_gone for link in self.links.values()):
            check()
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
        failed = {host: link.words or "it does not answer" for host, link in self.links.items() if not link.is_up}
        if failed and not self.can_do_without(failed):
            words = "; ".join(f"{host}: {text}" for host, text in failed.items())
            raise ConfigError(
                f"no keeper can be started on {', '.join(failed)} ({words}). Expected machines that ssh reaches "
                f"without a password, each with {sys.executable} and a folder {self._ways.memory} to write to"
            )
        for host, text in failed.items():
            self._log.note("unreachable", f"host {host} cannot be used: {text}", host=host)

    def _open(self, host: str) -> None:
        own = {"file": str(self._own_file)} if is_this_machine(host) else {}
        self.links[host] = Link(host, {**self._settings, **own})

    def usable(self) -> dict[str, int]:
        """Returns the hosts that the job can run on now, with their ranks."""
        left = self.up().keys() - self.noticed.keys() - self._left_out.keys()
        fit = {host: count for host, count in self.listed.items() if host in left}
        quick = {host: count for host, count in fit.items() if not self.slow.leaves_out(host)}
        if len(quick) == len(fit) or sum(quick.values()) >= max(1, self._ways.min_ranks):
            return quick
        slow = ", ".join(fit.keys() - quick.keys())
        self._log.note("slow", f"host {slow} is used all the same: a slow host is better than none")
        for host in fit:
            self.slow.forgive(host)
        return fit

    def can_do_without(self, hosts: Collection[str]) -> bool:
        """Says whether the job can run on the hosts that are there, but for some."""
        usable = self.usable()
        return sum(usable[host] for host in usable.keys() - set(hosts)) >= self._ways.min_ranks

    def leave_out(self, host: str, why: str) -> None:
        """Leaves a host out that cannot do its part, for a while that doubles each time; it is told the first time."""
        seconds = min(_LEFT_OUT_SECONDS, 2 * self._failed.get(host, _FAILED_SECONDS / 2))
        text = f"host {host} is left out, for {seconds:g} s at first: {why}"
        self._log.note("left_out", text, is_shown=host not in self._failed, host=host, seconds=seconds)
        self._failed[host], self._left_out[host] = seconds, time.monotonic() + seconds

    def up(self) -> dict[str, Link]:
        """Returns the keepers that answer, by host."""
        return {host: link for host, link in self.links.items() if link.is_up and not link.is_silent}

    def look_around(self) -> None:
        """Reads the machine list if it has changed, and tries hosts again whose keepers have gone. Never waits."""
        now = time.monotonic()
        if self._reading is not None and self._reading.done():
            self._take_list(self._reading)
            self._reading = None
        if now - self._last_look < BEAT_SECONDS:
            return
        self._last_look = now
        self._read_list()
        for host in self.listed:
            link = self.links.get(host)
            if link is None:
                self._open(host)
            elif link.is_gone:
                delay = self._delays.get(host, 0.0)
                if now - link.began > delay:
                    self._delays[host] = min(_MOST_AGAIN_SECONDS, max(_AGAIN_SECONDS, 2 * delay))
                    self._open(host)
            elif link.is_up:
                self._delays.pop(host, None)
            elif now - link.began > self._ways.start_seconds:
                link.cut()
        self._try_left_out(now)

    def find_unfit(self, hosts: Iterable[str]) -> list[str]:
        """Returns the hosts on which mpirun can start nothing, each tried by itself."""
        probes = {host: Probe(host, self._ways.start_seconds / 3) for host in hosts}
        while any(probe.worked is None for probe in probes.values()):
            time.sleep(LOOK_SECONDS)
        return [host for host, probe in probes.items() if not probe.worked]

    def _try_left_out(self, now: float) -> None:
        """Uses hosts again that were left out for long enough, and on which mpirun can start something."""
        for host, until in list(self._left_out.items()):
            if host not in self._probes and now > until:
                self._probes[host] = Probe(host, self._ways.start_seconds / 3)
            elif host in self._probes and (worked := self._probes[host].worked) is not None:
                del self._probes[host]
                if worked:
                    del self._left_out[host]
                else:
                    self.leave_out(host, "no rank can be started on it")

    def _read_list(self) -> None:
        """Reads the list in a thread: a command, or whoever knows addresses, may take long to answer."""
        changed = _time_of(self._ways.machine_list)
        if self._reading is not None or (self._ways.discover_hosts is None and changed == self._machine_time):
            return
        self._machine_time = changed
        ways = self._ways
        self._reading = _in_thread(partial(list_hosts, ways.machine_list, ways.gpus_per_node, ways.discover_hosts))

    def _take_list(self, reading: Future[dict[str, int]]) -> None:
        try:
            listed = {self._known_name(host): count for host, count in reading.result().items()}
        except ConfigError as error:
            if str(error) != self._fault_of_list:
                self._fault_of_list = str(error)
                self._log.note("list", f"the machine list is left as it was: {error}")
            return
        self._fault_of_list = ""
        for host in listed:
            if self._is_wanted_back(host):
                self.noticed.pop(host, None)
                self.slow.forgive(host)
                self._failed.pop(host, None)
                self._left_out.pop(host, None)
        for host in sorted(listed.keys() ^ self.listed.keys()):
            was = "added to" if host in listed else "taken from"
            self._log.note("list", f"host {host} was {was} the machine list", host=host)
        self.listed = listed

    def _known_name(self, host: str) -> str:
        """Returns the name that this machine has in the job if a host is this machine by another one; else its own."""
        return next(filter(is_this_machine, self.links), host) if is_this_machine(host) else host

    def _is_wanted_back(self, host: str) -> bool:
        """Says whether the list that was read asks again for a host that was to be left.

        Whoever writes a machine list after the notice says so. A command lists a host until it has gone: it says so
        only where the host was not there before.
        """
        if self._ways.discover_hosts is not None:
            return host not in self.listed
        return self._times_of_notices.get(host) != self._machine_time

    def notice(self, host: str, seconds: float) -> str:
        """Takes a notice that a host will be taken away; returns what is wrong with that, in words."""
        known = next((each for each in self.listed if each.rpartition("@")[2] == host), None)
        if known is None:
            return f"{host} is no host of this job; those are {', '.join(self.listed)}"
        self._log.note("notice", f"host {known} goes in {seconds:g} s", host=known, seconds=seconds)
        self._times_of_notices[known] = _time_of(self._ways.machine_list)  # which the manager may not have read yet
        self.noticed[known] = time.monotonic() + seconds
        return ""

    def leave_if_others_suffice(self, hosts: Iterable[str]) -> None:
        """Leaves hosts whose ranks were asked to end; without others the job goes on there, as long as it may."""
        new = [host for host in hosts if host not in self.noticed]
        if self.can_do_without(new):
            self.noticed |= dict.fromkeys(new, math.inf)

    # those of a run

    def begin(self, hosts: Iterable[str], number: int) -> None:
        """Tells keepers of the run that begins, and each where copies of its ranks' parts go."""
        links = [self.links[host] for host in hosts]
        asked = {}
        for place, link in enumerate(links):
            buddy = links[(place + 1) % len(links)]
            to = None if buddy is link else [buddy.address, buddy.port]
            asked[link.host] = link.ask("begin", number=number, buddy=to)
        answers(asked, END_SECONDS)
        self._begun = links

    def begin_anew(self, hosts: Iterable[str], number: int) -> None:
        """Tells all keepers again if one of them has been started anew, which the others would not find."""
        links = [self.links.get(host) for host in hosts]
        if links != self._begun and all(link is not None and link.is_up for link in links):
            self.begin(hosts, number)

    def ask(self, hosts: Iterable[str], do: str, **arguments: Any) -> dict[str, Future[Any]]:
        """Asks keepers to do something; those that are not there are left out."""
        return {host: self.links[host].ask(do, **arguments) for host in hosts if host in self.links}

    def take_reports(self, hosts: Iterable[str], watch: JobWatch) -> None:
        """Passes on what keepers have said; a silent host is lost, one whose keeper has gone gets another."""
        for host in hosts:
            link = self.links.get(host)
            if link is None:
                continue
            if link.is_silent:
                if host not in self.lost:
                    self._log.note("lost", f"host {host} does not answer any more", host=host)
                self.lost.add(host)
            elif link.is_gone and host not in self._delays:
                self._delays[host] = _AGAIN_SECONDS
                self._open(host)
            else:
                watch.take(host, link.report)
        self.slow.take(watch)

    def take_now(self, hosts: Iterable[str], watch: JobWatch) -> list[str]:
        """Passes on what keepers say of their ranks now; returns the hosts that do not answer."""
        reports = answers(self.ask(hosts, "ping"), BEAT_SECONDS)
        for host, report in reports.items():
            watch.take(host, report)
        return sorted(set(hosts) - reports.keys())

    def is_lost(self, host: str) -> bool:
        """Says whether a host of the run is gone; one whose keeper alone has gone gets a new one, and goes on."""
        link = self.links.get(host)
        if link is None or host in self.lost:
            return True
        is_late = not link.is_up and time.monotonic() - link.began > _REOPEN_SECONDS
        return is_late or (link.is_gone and host in self._delays)

    def cut(self, hosts: Iterable[str]) -> None:
        """Gives hosts up that do not answer."""
        for host in hosts:
            if (link := self.links.get(host)) is not None:
                link.cut()

    def release(self, hosts: Iterable[str]) -> None:
        """Ends the keepers of hosts that are not in the list any more; the job is on others, which have its state.

        This machine's stays, for it would end what is the job's here: mpirun, and the file by which notices come.
        """
        for host in self.links.keys() - self.listed.keys() - set(hosts):
            if not is_this_machine(host):
                self.links.pop(host).quit()

    def close(self) -> None:
        """Ends all keepers, which remove what is the job's."""
        for probe in self._probes.values():
            probe.end()
        for link in self.links.values():
            link.quit()
        for link in self.links.values():
            link.wait(END_SECONDS)


def _in_thread(do: Callable[[], dict[str, int]]) -> Future[dict[str, int]]:
    """Does something in a thread that this process does not wait for at its end."""
    answer: Future[dict[str, int]] = Future()

    def run() -> None:
        try:
            answer.set_result(do())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def _time_of(path: str | None) -> int:
    with suppress(OSError):
        return 0 if path is None else os.stat(path).st_mtime_ns
    return 0


@dataclass
class _Speed:
    """How many times as long as it should a rank takes, since when, and when that was last printed; 1: as it should."""

    factor: float = 1.0
    since: float = -math.inf
    last_shown: float = -math.inf
    is_shown: bool = False

    @property
    def lasts(self) -> bool:
        return time.monotonic() > self.since + _LASTING_SECONDS


class SlowHosts:
    """The slow ranks of a job: planned for, or, if one takes `most` times as long as before, its host is left out."""

    def __init__(self, log: EventLog, most: float) -> None:
        self._log = log
        self._most = most
        self._until: dict[str, float] = {}
        self._patience: dict[str, float] = {}
        self._has_planned = False
        self._speeds: defaultdict[Place, _Speed] = defaultdict(_Speed)
        self._run: tuple[tuple[str, int], ...] = ()
        self._planned_for: defaultdict[tuple[tuple[str, int], ...], set[Place]] = defaultdict(set)
        self._last_plan = -math.inf

    @property
    def wants_plan(self) -> bool:
        """Whether other ranks are slow than those that the plan knows of, for long, and it was not made just now."""
        others = [self._speeds[place] for place in self._used().keys() ^ self._planned_for[self._run]]
        return any(each.lasts for each in others) and time.monotonic() > self._last_plan + _BETWEEN_SECONDS

    def take(self, watch: JobWatch) -> None:
        """Takes what has been seen of the ranks' speeds."""
        while watch.changes:
            change = watch.changes.pop(0)
            place = watch.place_of(change.rank)
            if isinstance(change, Slow):
                self._take_slow(change, place)
            elif (speed := self._speeds[place]).factor > 1.0:
                text = f"rank {change.rank} on {place[0]} is as fast as before"
                self._log.note("recovered", text, is_shown=speed.is_shown, host=place[0])
                speed.factor, speed.since, speed.is_shown = 1.0, time.monotonic(), False

    def _take_slow(self, slow: Slow, place: Place) -> None:
        host, _ = place
        is_by_plan = slow.compared_with == "the prediction"
        if is_by_plan and self._has_planned:  # a plan that was made anew has measured the ranks by itself
            return
        speed, now = self._speeds[place], time.monotonic()
        if is_shown := now > speed.last_shown + _QUIET_SECONDS:
            speed.last_shown, speed.is_shown = now, True
        text = f"rank {slow.rank} on {host} takes {slow.factor:.2f} times as long as {slow.compared_with}"
        details = {"host": host, "rank": slow.rank, "factor": slow.factor, "compared_with": slow.compared_with}
        self._log.note("slow", text, is_shown=is_shown, **details)
        planned_for = self._planned_for[self._run]
        speed.factor = slow.factor * (speed.factor if place in planned_for else 1.0)
        speed.since = now
        planned_for.discard(place)
        if is_by_plan or slow.factor < self._most:
            return
        seconds = self._patience.get(host, _LEFT_OUT_SECONDS)
        self._patience[host], self._until[host] = 2 * seconds, time.monotonic() + seconds
        self._write()

    def begin(self, hosts: Mapping[str, int]) -> bool:
        """Says whether the plan for the hosts of a run that begins is to be made anew; then that is done."""
        self._run = tuple(hosts.items())
        is_wanted = self.wants_plan
        if is_wanted:
            self._has_planned, self._last_plan = True, time.monotonic()
            self._planned_for[self._run] = set(self._used())
        return is_wanted

    def _used(self) -> dict[Place, float]:
        """Returns the ranks of the run that are slow for long, or as the plan knows, on hosts that are to stay."""
        counts = {host: count for host, count in self._run if host not in self._until}
        return {
            place: speed.factor
            for place, speed in self._speeds.items()
            if speed.factor > 1.0 and place[1] < counts.get(place[0], 0)
            if speed.lasts or place in self._planned_for[self._run]
        }

    def factors(self) -> tuple[float, ...]:
        """Returns how many times as long as it should each rank of the run takes; the ranks are host by host."""
        used = self._used()
        return tuple(used.get((host, place), 1.0) for host, count in self._run for place in range(count))

    def leaves_out(self, host: str) -> bool:
        """Says whether a host is left out now."""
        if host in self._until and time.monotonic() > self._until[host]:
            for place, speed in self._speeds.items():
                speed.factor = 1.0 if place[0] == host else speed.factor
            self.forgive(host)
        return host in self._until

    def forgive(self, host: str) -> None:
        """Lets a host that was left out be used again."""
        if self._until.pop(host, None) is not None:
            self._write()

    def _write(self) -> None:
        with suppress(OSError):
            Path(SLOW_FILE).write_text("".join(f"{host}\n" for host in sorted(self._until)), encoding="utf-8")
