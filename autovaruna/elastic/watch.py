"""Defines `JobWatch`: what the ranks of one run report through their keepers, and which of them hang.

Nothing is to be tuned: how long is too long follows from the longest that ranks have gone without a call so far. An
alarm may be false, as when a script evaluates for the first time: until the job has come past that step, the next one
waits that much longer.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autovaruna.elastic.slow_ranks import Place, Recovered, Slow, Speeds

_LEAST_SECONDS = 20.0
_TIMES_LONGEST = 20.0
_LEAST_WORK_SECONDS = 5e-3  # of a step; what takes less varies by more than slow ranks do
_STOPPED_SECONDS = 4.0  # how long a process may be stopped, as by a debugger that comes and goes
_MOST_NAMES = 4
_UNKNOWN = {"newest": None, "copied": None, "is_alone": False}


@dataclass(frozen=True)
class Hang:
    """Ranks that stand still: which and where, for how long, and whether it was somebody else than their script."""

    words: str
    seconds: float
    is_from_outside: bool = False


@dataclass
class _ReportedRank:
    """A rank as it was last reported: where, what, and since when it is stopped."""

    host: str
    report: Mapping[str, Any]
    stopped_since: float | None = None
    last_call: int = -1


class JobWatch:
    """The ranks of one run, the attempt; `factors` are how many times as long as it should each takes by its plan.

    What the watch of the run `before` has learnt counts: the longest that ranks went without a call, and the alarm.
    """

    def __init__(self, attempt: int, before: JobWatch | None = None, factors: Sequence[float] = ()) -> None:
        self.attempt = attempt
        self._longest_seconds: float = 0.0 if before is None else before._longest_seconds
        self._alarm: tuple[int, float] = (-1, 0.0) if before is None else before._alarm  # its step and time
        self._planned_for = {rank: factor for rank, factor in enumerate(factors) if factor > 1.0}
        self._changes: list[Slow | Recovered] = []
        self._speeds: Speeds | None = None
        self._is_compared = False
        self._ranks: dict[int, _ReportedRank] = {}
        self._states: dict[str, Mapping[str, Any]] = {}
        self._num_calls = 0
        self._last_change = time.monotonic()

    def record(self, host: str, report: Mapping[str, Any]) -> None:
        """Records what a keeper has reported."""
        if self._states.get(host) is report or report.get("attempt") != self.attempt:
            return
        now = time.monotonic()
        self._states[host] = report
        for name, its in report["ranks"].items():
            seen = self._ranks.setdefault(int(name), _ReportedRank(host, its))
            seen.host, seen.report = host, its
            seen.stopped_since = (seen.stopped_since or now) if its["state"] == "T" else None
        self._compare([int(name) for name in report["ranks"]])
        num_calls = sum(seen.report["calls"] for seen in self._ranks.values())
        if num_calls != self._num_calls:
            if self.num_steps_here > 1:
                self._longest_seconds = max(self._longest_seconds, now - self._last_change)
            self._num_calls, self._last_change = num_calls, now

    def _compare(self, ranks: Iterable[int]) -> None:
        """Compares speeds by what ranks have computed since they were last compared."""
        predicted = next((state["predicted"] for state in self._states.values() if state["predicted"]), None)
        if self._speeds is None:
            if predicted is None or len(self._ranks) < len(predicted):
                return
            self._is_compared = max(predicted.values()) >= _LEAST_WORK_SECONDS
            self._speeds = Speeds({int(rank): seconds for rank, seconds in predicted.items()}, self._planned_for)
        for rank in ranks:
            seen = self._ranks[rank]
            for call, seconds in seen.report["work"]:
                if call > seen.last_call:
                    seen.last_call = call
                    self._changes += self._speeds.report(rank, call, seconds) if self._is_compared else []

    def last_calls(self, host: str) -> dict[int, int]:
        """Returns the last call of each rank of a host of which it is known what was computed; none at first."""
        return {rank: seen.last_call for rank, seen in self._ranks.items() if seen.host == host and seen.last_call >= 0}

    def pop_changes(self) -> list[tuple[Place, Slow | Recovered]]:
        """Returns the ranks that have become slow, or as fast as before, since the last time, and where they are."""
        changes, self._changes = self._changes, []
        return [(self._place_of(change.rank), change) for change in changes]

    def _place_of(self, rank: int) -> Place:
        host = self._ranks[rank].host
        return host, sorted(other for other, seen in self._ranks.items() if seen.host == host).index(rank)

    def step_of(self, rank: int) -> int:
        """Returns the number of the newest step that a rank has come to; 0: none in this run."""
        return self._ranks[rank].report["steps"] if rank in self._ranks else 0

    def is_out_of_memory(self, rank: int) -> bool:
        """Says whether the kernel of a rank's host has ended processes in this run because memory was short."""
        host = self._ranks[rank].host if rank in self._ranks else ""
        return bool(self._states.get(host, {}).get("memory_kills"))

    @property
    def num_steps(self) -> int:
        """The number of the newest step that any rank has come to; 0: none."""
        return max((seen.report["steps"] for seen in self._ranks.values()), default=0)

    @property
    def num_steps_here(self) -> int:
        """How many calls each rank has begun in this run, at least."""
        return min((seen.report["calls"] for seen in self._ranks.values()), default=0)

    @property
    def signalled_hosts(self) -> list[str]:
        """The hosts with ranks that a signal has asked to end."""
        return sorted({seen.host for seen in self._ranks.values() if seen.report["is_signalled"]})

    @property
    def holds_any(self) -> bool:
        """Whether the ranks of this run keep their states in memory of hosts."""
        return any(state["newest"] is not None for state in self._states.values())

    @property
    def refusal(self) -> str:
        """Why ranks of this run could not load the state that they were to go on from; empty: they could."""
        return next((state["refused"] for state in self._states.values() if state["refused"]), "")

    @property
    def full_hosts(self) -> list[str]:
        """The hosts that have no room for what their ranks, or others, keep in memory."""
        return sorted(host for host, state in self._states.items() if state["is_full"])

    @property
    def is_kept(self) -> bool:
        """Whether ranks of this run keep their states, or will once they train."""
        return any(seen.report["is_kept"] for seen in self._ranks.values())

    @property
    def can_leave(self) -> bool:
        """Whether the ranks of this run have trained and can end at the next border with all that they have done."""
        reports = [seen.report for seen in self._ranks.values()]
        return not self.full_hosts and any(its["is_kept"] and its["calls"] > its["is_inside"] for its in reports)

    def held_step(self, hosts: Collection[str]) -> int:
        """Returns the newest step that hosts have whole, each of several with a copy of another's, if any; -1: none."""
        states = [self._states.get(host, _UNKNOWN) for host in hosts]
        alone = [len(states) == 1 or its["is_alone"] for its in states]
        copied = [its["copied"] and its["copied"][1] for its in states]
        steps = [its["newest"] if is_alone else step for its, is_alone, step in zip(states, alone, copied, strict=True)]
        return min((-1 if step is None else int(step) for step in steps), default=-1)

    def hang(self) -> Hang | None:
        """Returns which ranks hang; None: none does."""
        now = time.monotonic()
        since = {rank: seen.stopped_since or now for rank, seen in self._ranks.items()}
        if stopped := {rank: seen for rank, seen in self._ranks.items() if now - since[rank] > _STOPPED_SECONDS}:
            words = f"{_named(stopped)} stopped by a signal"
            return Hang(words, now - min(map(since.__getitem__, stopped)), is_from_outside=True)
        silent, (step, seconds) = now - self._last_change, self._alarm
        longest = max(self._longest_seconds, seconds if self.num_steps <= step else 0.0)
        if self.num_steps_here < 2 or silent < max(_LEAST_SECONDS, _TIMES_LONGEST * longest):
            return None
        self._alarm = self.num_steps, silent
        return Hang(self._words(), silent)

    def skip(self, seconds: float) -> None:
        """Leaves out a time in which nobody could record reports, since the manager stood still."""
        self._last_change += seconds
        for seen in self._ranks.values():
            seen.stopped_since = None if seen.stopped_since is None else seen.stopped_since + seconds

    def first_gone(self, ended: Iterable[int]) -> str:
        """Says which rank was the first to go without a word, those aside that are known to have ended; empty: none."""
        gone = {rank: seen for rank, seen in self._ranks.items() if seen.report["gone_seconds"] > 0}
        silent = {rank: seen for rank, seen in gone.items() if rank not in set(ended)}
        if not silent:
            return ""
        first = max(silent, key=lambda rank: float(silent[rank].report["gone_seconds"]))
        return _named({first: silent[first]}) + " gone"

    def _words(self) -> str:
        """Says which ranks the others wait for, and where those are."""
        fewest = min(seen.report["calls"] for seen in self._ranks.values())
        late = {rank: seen for rank, seen in self._ranks.items() if seen.report["calls"] == fewest}
        outside = {rank: seen for rank, seen in late.items() if not seen.report["is_inside"]}
        if outside and len(outside) < len(self._ranks):
            return f"{_named(outside)} in the script, outside of the model; the others wait in it"
        if outside:
            return "all ranks are in the script, outside of the model"
        return f"{_named(late)} inside of the model, in call {fewest}"


def _named(ranks: Mapping[int, _ReportedRank]) -> str:
    names = [f"rank {rank} on {seen.host}" for rank, seen in sorted(ranks.items())]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more + (" is" if len(names) == 1 else " are")
