"""Defines `Hosts`: the hosts of a job with their keepers, and which of them can be used."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from autovaruna.elastic.host_list import is_one, is_this_machine, list_hosts
from autovaruna.elastic.job import can_start
from autovaruna.elastic.link import Link, answers, ping_all
from autovaruna.elastic.notices import EventLog
from autovaruna.elastic.options import MorphingOptions
from autovaruna.elastic.slow_ranks import LEFT_OUT_SECONDS, SlowRanks
from autovaruna.elastic.watch import JobWatch
from autovaruna.errors import ConfigError
from autovaruna.ranks.tls import Authority

Result = TypeVar("Result")
BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.05
END_SECONDS = 10.0  # how long a keeper may take to do what it is asked for
_REOPEN_SECONDS = 6.0
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 5.0, 10.0  # how long after a keeper has gone it is tried again
_SILENT = "it does not answer"
_FAILED_SECONDS = 10.0  # how long a host is left out that has failed, doubled each time


class Hosts:
    """The hosts of a job; `settings` begin the first line to each keeper, `own_file` is removed on this machine."""

    def __init__(
        self,
        listed: Mapping[str, int],
        options: MorphingOptions,
        settings: Mapping[str, Any],
        authority: Authority,
        own_file: Path,
        log: EventLog,
    ) -> None:
        self.listed = dict(listed)  # ranks of each host in the machine list
        self.links: dict[str, Link] = {}
        self.noticed: dict[str, float] = {}  # hosts that are to be left, with when they go, on the monotonic clock
        self.lost: set[str] = set()  # hosts of the run that do not answer any more
        self.unreached: dict[tuple[str, str], str] = {}  # by host, and the one it was last found not to reach, why
        self.sources: list[str] = []  # the hosts that the state of the run comes from
        self.slow = SlowRanks(log, options.slow_factor)
        self.check: Callable[[dict[str, int]], object] = lambda listed: None  # raises if the job cannot run on a list
        self._options = options
        self._settings, self._authority = settings, authority
        self._own_file = own_file
        self._log = log
        self._delays: dict[str, float] = {}
        self._left_out: dict[str, float] = {}  # until when hosts are, that have failed
        self._failed: dict[str, float] = {}  # for how long each was left out last
        self._probes: dict[str, Future[bool]] = {}  # of hosts that were left out
        self._told: set[tuple[str, ...]] = set()
        self._begun: list[Link] = []
        self._machine_time = _time_of(options.machine_list)
        self._times_of_notices: dict[str, int] = {}
        self._last_poll = 0.0
        self._is_over = threading.Event()
        self._reading: Future[dict[str, int]] | None = None
        self._fault_of_list = ""

    def start(self, check: Callable[[], None]) -> None:
        """Starts the keepers and calls `check` until each is up, or has failed; ConfigError if too few can start."""
        for host in self.listed:
            self._open(host)
        threading.Thread(target=ping_all, args=(self.links, self._is_over), daemon=True).start()
        deadline = time.monotonic() + self._options.start_seconds
        while any(not (link.is_ready or link.is_gone or self.standby_fault(host)) for host, link in self.links.items()):
            check()
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
        words = {host: link.fault or link.words or _SILENT for host, link in self.links.items()}
        failed = {host: words[host] for host, link in self.links.items() if link.fault or not link.is_up}
        if failed and not self.can_do_without(failed):
            each = "; ".join(f"{host}: {text}" for host, text in failed.items())
            raise ConfigError(
                f"no keeper can be started on {', '.join(failed)} ({each}). Expected machines that ssh reaches "
                f"without a password, each with {sys.executable} and a folder {self._options.memory} to write to"
            )
        for host in failed:
            self._tell_unusable(host, words[host])

    def _tell_unusable(self, host: str, words: str) -> None:
        """Tells once why a host cannot be used."""
        if words and (host, words) not in self._told:
            self._told.add((host, words))
            self._log.record("unreachable", f"host {host} cannot be used: {words}", host=host)

    def _open(self, host: str) -> None:
        own: dict[str, Any] = {"file": str(self._own_file)} if is_this_machine(host) else {}
        own["credentials"] = asdict(self._authority.credentials(host, self._options.insecure_copies))
        self.links[host] = Link(host, {**self._settings, **own})

    def usable(self) -> dict[str, int]:
        """Returns the hosts that the job can run on now, with their ranks."""
        up = {host for host, link in self.up().items() if not link.fault}
        left = up - self.noticed.keys() - self._left_out.keys()
        fit = {host: count for host, count in self.listed.items() if host in left}
        if self._are_enough(whole := {host: count for host, count in fit.items() if not self.standby_fault(host)}):
            fit = whole
        quick = {host: count for host, count in fit.items() if not self.slow.leaves_out(host)}
        if len(quick) == len(fit) or self._are_enough(quick):
            return quick
        slow = ", ".join(fit.keys() - quick.keys())
        self._log.record("slow", f"host {slow} is used all the same: a slow host is better than none")
        for host in fit:
            self.slow.forgive(host)
        return fit

    def _are_enough(self, hosts: Mapping[str, int]) -> bool:
        return sum(hosts.values()) >= max(1, self._options.min_ranks)

    def reports(self, hosts: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Returns the last reports of those of some hosts that have a keeper."""
        return {host: self.links[host].report for host in hosts if host in self.links}

    def standby_fault(self, host: str) -> str:
        """Says why what ranks import cannot be imported on a host, as far as that is known; empty: it can."""
        return "".join(report.get("standby_fault", "") for report in self.reports([host]).values())

    def can_do_without(self, hosts: Collection[str]) -> bool:
        """Says whether the job has enough ranks without some of its hosts."""
        usable = self.usable()
        return sum(usable[host] for host in usable.keys() - set(hosts)) >= self._options.min_ranks

    def leave_out(self, host: str, why: str) -> None:
        """Leaves a host out that failed, for a time that doubles each time; only the first time is printed."""
        seconds = min(LEFT_OUT_SECONDS, 2 * self._failed.get(host, _FAILED_SECONDS / 2))
        text = f"host {host} is left out, for {seconds:g} s at first: {why}"
        self._log.record("left_out", text, is_shown=host not in self._failed, host=host, seconds=seconds)
        self._failed[host], self._left_out[host] = seconds, time.monotonic() + seconds

    def up(self) -> dict[str, Link]:
        """Returns the keepers that answer, by host."""
        return {host: link for host, link in self.links.items() if link.is_up and not link.is_silent}

    def poll_hosts(self) -> None:
        """Reads the machine list if it has changed, and tries hosts again whose keepers have gone. Never waits."""
        now = time.monotonic()
        if self._reading is not None and self._reading.done():
            self._apply_list(self._reading)
            self._reading = None
        if now - self._last_poll < BEAT_SECONDS:
            return
        self._last_poll = now
        with suppress(OSError):
            os.utime(self._own_file)  # so that it is known when this manager was there last
        self._read_list()
        for host in self.listed:
            link = self.links.get(host)
            if link is None:
                self._open(host)
            elif link.is_gone:
                self._tell_unusable(host, "" if link.port else link.words)
                delay = self._delays.get(host, 0.0)
                if now - link.began > delay:
                    self._delays[host] = min(_MOST_AGAIN_SECONDS, max(_AGAIN_SECONDS, 2 * delay))
                    self._open(host)
            elif link.is_up:
                self._delays.pop(host, None)
                self._tell_unusable(host, link.fault or self.standby_fault(host))
            elif now - link.began > self._options.start_seconds:
                self._tell_unusable(host, link.words or _SILENT)
                link.cut()
        self._try_left_out(now)

    def find_unfit(self, hosts: Iterable[str]) -> list[str]:
        """Tries each host by itself; returns those on which mpirun can start nothing."""
        probes = {host: self._probe(host) for host in hosts}
        return [host for host, probe in probes.items() if not probe.result()]

    def find_apart(self, hosts: Collection[str]) -> dict[str, str]:
        """Returns the fewest hosts without which all others reach each other, as far as found, each with why."""
        links = [self.links[host] for host in hosts if host in self.links and self.links[host].is_answering]
        places = [(link.host, link.address, link.port) for link in links]
        asked = {
            link.host: link.ask("reach", others=[each for each in places if each[0] != link.host]) for link in links
        }
        faults = {(one, other): why for one, its in answers(asked, END_SECONDS).items() for other, why in its.items()}
        self.unreached = {pair: why for pair, why in self.unreached.items() if not asked.keys() >= set(pair)} | faults
        found: dict[str, str] = {}
        while left := [pair for pair in faults if not found.keys() & set(pair)]:
            counts = Counter(host for pair in left for host in pair)
            worst = max(reversed([link.host for link in links]), key=lambda host: counts[host])
            one, other = next(pair for pair in left if worst in pair)
            found[worst] = f"{one} does not reach {other} ({faults[one, other]})"
        return found

    def _probe(self, host: str) -> Future[bool]:
        return _in_thread(lambda: can_start(host, self._options.start_seconds / 3, self._is_over))

    def _try_left_out(self, now: float) -> None:
        """Tries hosts whose time is over; those on which mpirun can start something are used again."""
        for host, until in list(self._left_out.items()):
            if host not in self._probes and now > until:
                self._probes[host] = self._probe(host)
            elif host in self._probes and self._probes[host].done():
                begun = [link.host for link in self._begun]
                if self._probes.pop(host).result() and not self.find_apart({host, *begun}):
                    del self._left_out[host]
                else:
                    self.leave_out(host, "no rank can be started on it")

    def _read_list(self) -> None:
        """Reads the list in a thread: a command, or a name server, may take long."""
        changed = _time_of(self._options.machine_list)
        if self._reading is not None or (self._options.discover_hosts is None and changed == self._machine_time):
            return
        self._machine_time = changed
        self._reading = _in_thread(self._new_list)

    def _new_list(self) -> dict[str, int]:
        """Returns the ranks of the hosts in the list as it is now, by their names in the job, if it can run on them."""
        found = list_hosts(self._options.machine_list, self._options.gpus_per_node, self._options.discover_hosts)
        listed = {self._known_name(host): count for host, count in found.items()}
        if listed != self.listed:
            self.check(listed)
        return listed

    def _apply_list(self, reading: Future[dict[str, int]]) -> None:
        try:
            listed = reading.result()
        except Exception as error:  # whatever a list, or what looks names up, comes up with: the job goes on
            if str(error) != self._fault_of_list:
                self._fault_of_list = str(error)
                self._log.record("list", f"the machine list is left as it was: {error}")
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
            self._log.record("list", f"host {host} was {was} the machine list", host=host)
        self.listed = listed

    def _known_name(self, host: str) -> str:
        """Returns the name that a host has in the job, where it is listed by another one now."""
        known = [] if host in self.links else list(self.links)
        if is_this_machine(host):
            return next(filter(is_this_machine, known), host)
        return next((each for each in known if is_one(each, host)), host)

    def _is_wanted_back(self, host: str) -> bool:
        """Says whether the new list asks again for a host that was to be left.

        A file that was written after the notice does. A command lists a host until it has gone, so it does only if the
        host was missing in the list before.
        """
        if self._options.discover_hosts is not None:
            return host not in self.listed
        return self._times_of_notices.get(host) != self._machine_time

    def notice(self, host: str, seconds: float) -> str:
        """Records a notice that a host will be taken away; returns a complaint, empty if there is none."""
        known = next((each for each in self.listed if each.rpartition("@")[2] == host), None)
        if known is None:
            return f"{host} is no host of this job; those are {', '.join(self.listed)}"
        self._log.record("notice", f"host {known} goes in {seconds:g} s", host=known, seconds=seconds)
        self._times_of_notices[known] = _time_of(self._options.machine_list)  # which the manager may not have read yet
        self.noticed[known] = time.monotonic() + seconds
        return ""

    def leave_if_others_suffice(self, hosts: Iterable[str]) -> None:
        """Leaves hosts whose ranks were asked to end, if the others have enough ranks for the job."""
        new = [host for host in hosts if host not in self.noticed]
        if self.can_do_without(new):
            self.noticed |= dict.fromkeys(new, math.inf)

    # those of a run

    def begin(self, hosts: Iterable[str], number: int, num_ranks: int) -> None:
        """Begins a run on keepers, each of which copies its ranks' parts to the next one."""
        links, asked = [self.links[host] for host in hosts], {}
        for link, buddy in zip(links, [*links[1:], *links[:1]], strict=True):
            link.known = {}
            to = None if buddy is link else [buddy.address, buddy.port, buddy.host]
            asked[link.host] = link.ask("begin", number=number, num_ranks=num_ranks, buddy=to)
        answers(asked, END_SECONDS)
        self._begun = links

    def begin_anew(self, hosts: Iterable[str], number: int, num_ranks: int) -> None:
        """Begins the run again on all keepers if one of them was started anew: it has another port."""
        links = [self.links.get(host) for host in hosts]
        if links != self._begun and all(link is not None and link.is_up for link in links):
            self.begin(hosts, number, num_ranks)

    def ask(self, hosts: Iterable[str], do: str, **arguments: Any) -> dict[str, Future[Any]]:
        """Sends a request to the keepers of those hosts that have one."""
        return {host: self.links[host].ask(do, **arguments) for host in hosts if host in self.links}

    def record_copy_faults(self, hosts: Iterable[str]) -> None:
        """Records, once for each reason, of which hosts no copies arrive at another one that is there."""
        for host, report in self.reports(hosts).items():
            to, why = report.get("copy_fault") or ("", "")
            if to in self.links and self.links[to].is_answering and (host, to, why) not in self._told:
                self._told.add((host, to, why))
                text = f"no copies of {host} arrive at {to}: {why}. What {host} has in memory is lost with it"
                self._log.record("copies", text, host=host, to=to)

    def copy_seconds(self, hosts: Iterable[str]) -> float:
        """Returns how long the last copies between hosts took, at most."""
        return max((report.get("copy_seconds", 0.0) for report in self.reports(hosts).values()), default=0.0)

    def keeps_older(self, host: str, step: int) -> bool:
        """Says whether a host still keeps of earlier runs what is no newer than a step."""
        kept = self.links[host].report.get("kept")
        return kept is not None and kept <= step

    def poll_reports(self, hosts: Iterable[str], watch: JobWatch) -> None:
        """Hands the last reports of keepers on; a silent host is lost, one whose keeper has gone gets another."""
        for host in hosts:
            link = self.links.get(host)
            if link is None:
                continue
            if link.is_silent:
                if host not in self.lost:
                    self._log.record("lost", f"host {host} does not answer any more", host=host)
                self.lost.add(host)
            elif link.is_gone and host not in self._delays:
                self._delays[host] = _AGAIN_SECONDS
                self._open(host)
            else:
                watch.record(host, link.report)
                link.known = watch.last_calls(host)
        self.slow.record(watch.pop_changes())

    def ask_reports(self, hosts: Iterable[str], watch: JobWatch) -> list[str]:
        """Asks keepers for reports now, and hands them on; returns the hosts that do not answer."""
        reports = answers(self.ask(hosts, "ping"), BEAT_SECONDS)
        for host, report in reports.items():
            watch.record(host, report)
        return sorted(set(hosts) - reports.keys())

    def is_lost(self, host: str) -> bool:
        """Says whether a host of the run is gone; if its keeper alone is, a new one is waited for."""
        link = self.links.get(host)
        if link is None or host in self.lost:
            return True
        is_late = not link.is_up and time.monotonic() - link.began > _REOPEN_SECONDS
        return is_late or (link.is_gone and host in self._delays)

    def cut(self, hosts: Iterable[str]) -> None:
        """Gives hosts up that do not answer."""
        for host in self.links.keys() & set(hosts):
            self.links[host].cut()

    def release(self, hosts: Iterable[str]) -> None:
        """Ends the keepers of hosts that are not in the list any more, but this machine's, which would end mpirun."""
        for host in self.links.keys() - self.listed.keys() - set(hosts):
            if not is_this_machine(host):
                self.links.pop(host).quit()

    def close(self, keeps: bool = False) -> None:
        """Ends all keepers, which remove what is the job's, or keep it for as long as without a manager."""
        self._is_over.set()
        for probe in self._probes.values():
            probe.exception()  # once it has cleaned up
        for link in self.links.values():
            link.quit(keeps)
        deadline = time.monotonic() + END_SECONDS
        for link in () if keeps else self.links.values():
            link.wait(max(0.0, deadline - time.monotonic()))


def _in_thread(do: Callable[[], Result]) -> Future[Result]:
    """Calls a function in a thread that may outlive the job."""
    answer: Future[Result] = Future()

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
