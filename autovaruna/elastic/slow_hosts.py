"""Defines `SlowHosts`: hosts whose ranks are slow get a plan that gives them less, or the job goes on without them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from autovaruna.elastic.events import EventLog
from autovaruna.elastic.speeds import Slow
from autovaruna.elastic.watch import Watch

FILE = "slow_machines.out"
"""Gets the hosts that are left out, a name a line, as Varuna writes it."""
_BETWEEN_SECONDS = 120.0
"""The least time between two plans that are made anew for the sake of speeds."""
_LEFT_OUT_SECONDS = 600.0
"""After so long a host that was left out is tried again; doubled each time that it is still slow."""


class SlowHosts:
    """The hosts of a job that have become slow.

    Args:
        log: Hears of each change.
        most: How many times as long as before a rank may take, for its host to stay.

    Attributes:
        wants_plan: whether a plan by the speeds of now would be better.
    """

    def __init__(self, log: EventLog, most: float) -> None:
        self.wants_plan = False
        self._log = log
        self._most = most
        self._until: dict[str, float] = {}
        self._patience: dict[str, float] = {}
        self._has_planned = False
        self._known: set[str] = set()
        self._last_plan = -_BETWEEN_SECONDS

    def take(self, watch: Watch) -> None:
        """Takes what has been seen of the ranks' speeds."""
        while watch.changes:
            change = watch.changes.pop(0)
            host = watch.host_of(change.rank)
            if isinstance(change, Slow):
                self._take_slow(change, host)
            elif host in self._known:
                self._known.discard(host)
                self._log.note("recovered", f"rank {change.rank} on {host} is as fast as before", host=host)
                self._wish()

    def _take_slow(self, slow: Slow, host: str) -> None:
        is_by_plan = slow.compared_with == "the prediction"
        if is_by_plan and self._has_planned:  # a plan that was made anew has measured the ranks by itself
            return
        text = f"rank {slow.rank} on {host} takes {slow.factor:.2f} times as long as {slow.compared_with}"
        self._log.note("slow", text, host=host, rank=slow.rank, factor=slow.factor, compared_with=slow.compared_with)
        self._known.add(host)
        if is_by_plan or slow.factor < self._most:
            self._wish()
            return
        seconds = self._patience.get(host, _LEFT_OUT_SECONDS)
        self._patience[host], self._until[host] = 2 * seconds, time.monotonic() + seconds
        self._write()

    def _wish(self) -> None:
        self.wants_plan |= time.monotonic() - self._last_plan > _BETWEEN_SECONDS

    def take_wish(self) -> bool:
        """Says whether the plan is to be made anew for the run that begins; then that is done."""
        is_wanted, self.wants_plan = self.wants_plan, False
        if is_wanted:
            self._has_planned, self._last_plan = True, time.monotonic()
        return is_wanted

    def leaves_out(self, host: str) -> bool:
        """Says whether a host is left out now."""
        if host in self._until and time.monotonic() > self._until[host]:
            self.forgive(host)
        return host in self._until

    def forgive(self, host: str) -> None:
        """Lets a host that was left out be used again."""
        if self._until.pop(host, None) is not None:
            self._write()

    def _write(self) -> None:
        with suppress(OSError):
            Path(FILE).write_text("".join(f"{host}\n" for host in sorted(self._until)), encoding="utf-8")
