"""Replays a trace of hosts that come and go against plans, and shows what part of the ideal throughput is kept.

`read_trace` reads the hosts, `replay` goes through them by the rules of `_Job`, and the command shows what is left.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from autovaruna.commands.printing import add_json, show, show_json
from autovaruna.config.files import at_home
from autovaruna.errors import ConfigError, InputError
from autovaruna.planner.deployment import load
from autovaruna.planner.table import seconds

EXAMPLE = "autovaruna simulate --trace hosts.csv --plan deployment.json"
KILL, NOTICE = "kill", "notice"
_HEADERS = ["seconds", "hosts"], ["seconds", "hosts", "event"]
_NEVER = math.inf
_ROUNDING = 1e-9
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Change:
    """A row of a trace: from a moment on, so many hosts are there."""

    seconds: float
    hosts: int
    event: str = ""  # `KILL`: of a rank or the job; `NOTICE`: hosts that leave have said so; empty: they are lost


def _cost(default: Number, meaning: str) -> Number:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class FaultCosts:
    """What the faults of a job cost: seconds to the next step under way, and steps that may be lost."""

    kill_seconds: float = _cost(3.0, "from the death of a rank to the next step")
    loss_seconds: float = _cost(6.0, "from the loss of a host")
    change_seconds: float = _cost(4.0, "from a notice, or a host that comes")
    stop_seconds: float = _cost(1.0, "the last part of these, in which nothing is computed")
    cold_seconds: float = _cost(15.0, "from the first host that comes where none was left")
    copy_steps: int = _cost(10, "steps between two copies to other hosts")
    checkpoint_steps: int = _cost(100, "steps between two checkpoints on disk")


@dataclass
class Throughput:
    """What a trace left of a job's throughput, in steps of the global batch."""

    seconds: float = 0.0
    ideal_steps: float = 0.0  # what hosts that were there would have done without faults: the sum of the next four
    done_steps: float = 0.0  # what was done and kept
    restart_steps: float = 0.0  # what would have been done while the job was restarted
    lost_steps: float = 0.0  # what was done and then lost, a step under way included
    smaller_steps: float = 0.0  # what is missing while a plan ran that is for fewer hosts than were there, or none
    all_hosts_steps: float = 0.0  # what would have been done if all hosts had always been there
    num_restarts: int = 0  # those included that another fault ended
    num_kills: int = 0
    num_losses: int = 0
    num_notices: int = 0
    num_additions: int = 0

    def of_ideal(self, steps: float) -> float:
        """Returns a number of steps as a share of the ideal."""
        return steps / self.ideal_steps if self.ideal_steps else 0.0


def read_trace(path: str | os.PathLike[str]) -> list[Change]:
    """Reads a trace: a CSV file with the columns ``seconds,hosts`` or ``seconds,hosts,event``; its last row ends it.

    The row of names may be left out; empty lines and those that begin with ``#`` are skipped. Raises InputError, with
    file and line, if it cannot be read, or a row is wrong.
    """
    try:
        lines = Path(at_home(path)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The trace {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    trace: list[Change] = []
    for number, line in _rows(lines):
        try:
            trace.append(_change(line, trace[-1] if trace else None))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}; correct the line") from error
    if len(trace) < 2:
        raise InputError(
            f"The trace {path} has {len(trace)} rows; expected two or more, as 0,3 and 600,2: the last one ends it"
        )
    if not any(change.hosts for change in trace[:-1]):
        raise InputError(f"The trace {path} never has a host; expected one or more in some row before the last")
    return trace


def _rows(lines: Iterable[str]) -> list[tuple[int, list[str]]]:
    """Returns the rows that say something, each with the number of its line."""
    cells = (next(csv.reader([line.lstrip("\ufeff")]), []) for line in lines)
    rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(cells, 1)]
    rows = [(number, row) for number, row in rows if any(row) and not row[0].startswith("#")]
    return rows[1:] if rows and rows[0][1] in _HEADERS else rows


def _change(row: Sequence[str], before: Change | None) -> Change:
    """Returns the change that a row says; raises ValueError if it is none."""
    if len(row) not in (2, 3):
        raise ValueError(f"got {len(row)} columns ({','.join(row)}), expected seconds,hosts or seconds,hosts,event")
    seconds, hosts, event = _seconds(row[0]), _hosts(row[1]), row[2] if len(row) == 3 else ""
    if before and not seconds > before.seconds:
        raise ValueError(f"seconds are {row[0]}, expected more than {before.seconds:g}, those of the row before")
    if event not in ("", KILL, NOTICE):
        raise ValueError(f"event is {event!r}, expected {KILL}, {NOTICE} or nothing")
    if event == KILL and not (before and before.hosts == hosts):
        raise ValueError(f"hosts are {hosts} at a {KILL}, expected as many as in the row before")
    if event == NOTICE and not (before and before.hosts > hosts):
        raise ValueError(f"hosts are {hosts} at a {NOTICE}, expected fewer than in the row before")
    return Change(seconds, hosts, event)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"seconds are {text!r}, expected a number of 0 or more")
    return value


def _hosts(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"hosts are {text!r}, expected a whole number of 0 or more")
    return int(text)


def replay(trace: Sequence[Change], step_seconds: Mapping[int, float], costs: FaultCosts) -> Throughput:
    """Replays a trace, whose last change ends it, with the seconds of a step by number of hosts.

    The job runs on the hosts of the first row when the trace begins. A host that is lost is one that it uses. Where two
    hosts are lost before the job runs again, or the last one is, it goes on from disk.
    """
    job = _Job(Rates(step_seconds), costs, trace[0].seconds, trace[0].hosts)
    most = max(change.hosts for change in trace)
    for change in trace[1:]:
        job.run_to(change.seconds)
        if change is not trace[-1]:
            job.apply(change)
    result = job.result
    result.seconds = trace[-1].seconds - trace[0].seconds
    result.done_steps = job.steps
    result.all_hosts_steps = job.rates.ideal(most) * result.seconds
    return result


class Rates:
    """Steps a second by number of hosts, from the seconds of a step for those that there are plans for."""

    def __init__(self, step_seconds: Mapping[int, float]) -> None:
        self._known = {hosts: 1.0 / seconds for hosts, seconds in sorted(step_seconds.items())}

    def best(self, hosts: int) -> float:
        """Returns the rate of the fastest plan for so many hosts or fewer, 0 if there is none."""
        return max((rate for known, rate in self._known.items() if known <= hosts), default=0.0)

    def ideal(self, hosts: int) -> float:
        """Returns the rate that hosts are worth: their fastest plan's; without a plan, their share of the nearest."""
        if hosts in self._known:
            return self.best(hosts)
        nearest = max((known for known in self._known if known <= hosts), default=min(self._known))
        return max(self._known[nearest] * hosts / nearest, self.best(hosts))


@dataclass
class _Job:
    """A job between the rows of a trace."""

    rates: Rates
    costs: FaultCosts
    now: float
    hosts: int
    steps: float = 0.0  # that it has, the part of one that is under way included
    running_at: float = _NEVER  # when the restart that is under way ends
    switch_at: float = _NEVER  # when it stops to change to a better plan
    next_rate: float = 0.0  # after the restart
    is_safe: bool = True  # whether each part is in the memory of two hosts, as it is once the job runs
    result: Throughput = field(default_factory=Throughput)

    def __post_init__(self) -> None:
        self.rate = self.rates.best(self.hosts)  # steps a second of its plan, 0 while it stands still

    def run_to(self, end: float) -> None:
        while (moment := min(self.running_at, self.switch_at)) < end:
            self._pass(moment)
            if moment == self.running_at:
                self._begin()
            else:
                self._restart(self.costs.stop_seconds)
        self._pass(end)

    def apply(self, change: Change) -> None:
        """Does what a row of the trace says."""
        gone, self.hosts = self.hosts - change.hosts, change.hosts
        if change.event == KILL:
            self.result.num_kills += 1
            if self.rate > 0 or self.running_at < _NEVER:
                self.result.lost_steps += self._go_back(1)
                self._restart(self.costs.kill_seconds)
        elif gone > 0 and change.event == NOTICE:
            self.result.num_notices += 1
            self._hand_over()
        elif gone > 0:
            self.result.num_losses += 1
            self._lose(gone)
        elif gone < 0:
            self.result.num_additions += 1
            self._grow(was_empty=self.hosts + gone == 0)

    def _hand_over(self) -> None:
        """Leaves hosts after the last step that ends before they go; the rest of the time is lost to the restart."""
        seconds = self.costs.stop_seconds if self.rate else self.costs.change_seconds
        self.result.restart_steps += self._go_back(1)
        self._restart(seconds)

    def _lose(self, gone: int) -> None:
        is_in_memory = self.is_safe and gone == 1 and self.hosts > 0
        self.result.lost_steps += self._go_back(self.costs.copy_steps if is_in_memory else self.costs.checkpoint_steps)
        self.is_safe = False
        self._restart(self.costs.loss_seconds)

    def _grow(self, was_empty: bool) -> None:
        if self.rate:
            self._plan_switch()
        elif self.running_at == _NEVER:
            self._restart(self.costs.cold_seconds if was_empty else self.costs.change_seconds)

    def _restart(self, seconds: float) -> None:
        """Stands still for some seconds, then runs on the hosts that are there; waits where they are too few."""
        self.next_rate = self.rates.best(self.hosts)
        self.rate, self.switch_at = 0.0, _NEVER
        self.running_at = self.now + seconds if self.next_rate else _NEVER
        self.result.num_restarts += self.running_at < _NEVER

    def _begin(self) -> None:
        self.rate, self.running_at, self.is_safe = self.next_rate, _NEVER, True
        self._plan_switch()

    def _plan_switch(self) -> None:
        """Has the job stop at the first end of a step after a better plan is ready."""
        if self.rates.best(self.hosts) <= self.rate:
            return
        ready = self.now + max(0.0, self.costs.change_seconds - self.costs.stop_seconds)
        steps = self.steps + (ready - self.now) * self.rate
        self.switch_at = ready + (math.ceil(steps - _ROUNDING) - steps) / self.rate

    def _go_back(self, multiple: int) -> float:
        """Goes back to the last step that is a multiple of a number; returns how many are gone."""
        kept = float(math.floor((self.steps + _ROUNDING) / multiple) * multiple)
        gone, self.steps = max(0.0, self.steps - kept), kept
        return gone

    def _pass(self, end: float) -> None:
        seconds, ideal = end - self.now, self.rates.ideal(self.hosts)
        self.now = end
        self.steps += self.rate * seconds
        self.result.ideal_steps += ideal * seconds
        missing = (ideal - self.rate) * seconds
        if self.running_at < _NEVER:
            self.result.restart_steps += missing
        else:
            self.result.smaller_steps += missing


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE", help="CSV: seconds,hosts or seconds,hosts,event")
    seconds_of = parser.add_mutually_exclusive_group(required=True)
    add_source = seconds_of.add_argument
    add_source("--plan", nargs="+", metavar="FILE", help="deployments, one for each number of hosts")
    add_source("--step-seconds", metavar="1=S,2=S", help="seconds of a step by number of hosts, in place of plans")
    add_json(parser)
    costs = parser.add_argument_group("costs of faults")
    for cost in fields(FaultCosts):
        meaning, kind = f"{cost.metadata['meaning']} ({cost.default:g})", type(cost.default)
        costs.add_argument(
            f"--{cost.name.replace('_', '-')}", type=kind, default=cost.default, metavar="N", help=meaning
        )


def run(options: argparse.Namespace) -> None:
    """Replays a trace of hosts that come and go against plans, and shows what part of the ideal throughput is kept."""
    costs = _costs(options)
    trace = read_trace(options.trace)
    step_seconds = _of_deployments(options.plan) if options.plan else _of_text(options.step_seconds)
    result = replay(trace, step_seconds, costs)
    if options.json:
        show_json(_record(result, step_seconds, costs))
        return
    show(_report(options.trace, trace, result))
    listed = ", ".join(f"{number}: {seconds(value)}" for number, value in sorted(step_seconds.items()))
    without = sorted({change.hosts for change in trace[:-1]} - {0, *step_seconds})
    none = f"; no plan for {', '.join(map(str, without))}: the best for fewer runs, or none" if without else ""
    show(f"a step by number of hosts: {listed}{none}")


def _costs(options: argparse.Namespace) -> FaultCosts:
    costs = FaultCosts(**{each.name: getattr(options, each.name) for each in fields(FaultCosts)})
    for name, value in asdict(costs).items():
        least = 1 if name.endswith("_steps") else 0
        if not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected {least} or more")
    if costs.stop_seconds > costs.change_seconds:
        raise ConfigError(
            f"--stop-seconds is {costs.stop_seconds:g}; expected a part of --change-seconds, {costs.change_seconds:g}"
        )
    return costs


def _of_text(given: str) -> dict[int, float]:
    found = {}
    for pair in given.split(","):
        number, _, text = pair.partition("=")
        try:
            found[int(number)] = float(text)
        except ValueError:
            found[0] = 0.0
    if any(number < 1 or not 0 < value < math.inf for number, value in found.items()):
        raise ConfigError(f"--step-seconds is {given!r}; expected hosts=seconds, as 1=0.9,2=0.5")
    return found


def _of_deployments(paths: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for path in paths:
        deployment = load(path)
        number, value = len(deployment.fingerprint.hosts), deployment.plan.predicted_seconds
        if not value or number in found:
            why = f"another one is for {number} hosts, too" if value else "it predicts no seconds"
            raise ConfigError(f"--plan {path}: {why}; expected one deployment for each number of hosts")
        found[number] = value
    return found


def _record(result: Throughput, step_seconds: Mapping[int, float], costs: FaultCosts) -> dict[str, object]:
    return {
        "share_of_ideal": result.of_ideal(result.done_steps),
        "lost_to_restarts": result.of_ideal(result.restart_steps),
        "lost_to_lost_steps": result.of_ideal(result.lost_steps),
        "lost_to_smaller_plans": result.of_ideal(result.smaller_steps),
        **asdict(result),
        "step_seconds": dict(step_seconds),
        "costs": asdict(costs),
    }


def _report(path: str, trace: list[Change], result: Throughput) -> str:
    counts = [change.hosts for change in trace[:-1]]
    changes = {"host losses": result.num_losses, "notices": result.num_notices}
    changes |= {"additions": result.num_additions, "kills": result.num_kills}
    happened = ", ".join(f"{count} {name}" for name, count in changes.items() if count) or "no change"
    rows = (
        ("share of the ideal", result.done_steps, f"{result.done_steps:,.0f} of {result.ideal_steps:,.0f} steps"),
        ("lost to restarts", result.restart_steps, f"{result.num_restarts} restarts"),
        ("lost to lost steps", result.lost_steps, f"{result.lost_steps:,.1f} steps"),
        ("lost to smaller plans", result.smaller_steps, "hosts were there that the plan did not use"),
    )
    away = 1.0 - result.ideal_steps / result.all_hosts_steps
    return "\n".join(
        [
            f"{path}: {result.seconds / 3600:.4g} h, {min(counts)} to {max(counts)} hosts, {happened}",
            *(f"{name:<22}{result.of_ideal(steps):8.2%}   {what}" for name, steps, what in rows),
            f"The ideal is what the hosts that are there would do without faults; hosts that are away cost {away:.1%} "
            f"of what {max(counts)} would do.",
        ]
    )
