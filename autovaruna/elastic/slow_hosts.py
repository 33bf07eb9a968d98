"""Defines `SlowHosts`: the ranks of a job that are slow, for whom a plan is made anew, or whose host is left out."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autovaruna.elastic.notices import EventLog
from autovaruna.elastic.speeds import Place, Slow
from autovaruna.elastic.watch import JobWatch

SLOW_FILE = "slow_machines.out"  # gets the hosts that are left out, a name a line, as Varuna writes it
_BETWEEN_SECONDS = 120.0  # the least time between two plans that are made anew for the sake of speeds
_LASTING_SECONDS = 10.0  # what is slow for less than a restart takes is not worth one
_QUIET_SECONDS = 60.0  # how long nothing more is printed of a rank that is slow from time to time; the events have all
LEFT_OUT_SECONDS = 600.0
"""After so long a host that was left out is tried again; doubled each time that it is still slow."""


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
        """Whether other ranks are slow than those that the plan knows of, for long, and it was not made just now.

        One rank alone has all to do, however slow it is.
        """
        if sum(count for _, count in self._run) < 2:
            return False
        others = [self._speeds[place] for place in self._used().keys() ^ self._planned_for[self._run]]
        return any(each.lasts for each in others) and time.monotonic() > self._last_plan + _BETWEEN_SECONDS

    def record(self, watch: JobWatch) -> None:
        """Records which ranks have become slow, or are so no more."""
        while watch.changes:
            change = watch.changes.pop(0)
            place = watch.place_of(change.rank)
            if isinstance(change, Slow):
                self._record_slow(change, place)
            elif (speed := self._speeds[place]).factor > 1.0:
                text = f"rank {change.rank} on {place[0]} is as fast as before"
                self._log.record("recovered", text, is_shown=speed.is_shown, host=place[0])
                speed.factor, speed.since, speed.is_shown = 1.0, time.monotonic(), False

    def _record_slow(self, slow: Slow, place: Place) -> None:
        host, _ = place
        is_by_plan = slow.compared_with == "the prediction"
        if is_by_plan and self._has_planned:  # a plan that was made anew has measured the ranks by itself
            return
        speed, now = self._speeds[place], time.monotonic()
        if is_shown := now > speed.last_shown + _QUIET_SECONDS:
            speed.last_shown, speed.is_shown = now, True
        text = f"rank {slow.rank} on {host} takes {slow.factor:.2f} times as long as {slow.compared_with}"
        details = {"host": host, "rank": slow.rank, "factor": slow.factor, "compared_with": slow.compared_with}
        self._log.record("slow", text, is_shown=is_shown, **details)
        planned_for = self._planned_for[self._run]
        speed.factor = slow.factor * (speed.factor if place in planned_for else 1.0)
        speed.since = now
        planned_for.discard(place)
        if is_by_plan or slow.factor < self._most:
            return
        seconds = self._patience.get(host, LEFT_OUT_SECONDS)
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
