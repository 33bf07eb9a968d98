"""Holds what a simulation found: times, lost time, the schedule; draws it as a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autovaruna.schedule.pipeline import FORWARD, Instruction, Kind, Schedule
from autovaruna.schedule.replica import Replica

Act = tuple[float, float, Replica, Kind, int]
"""One instruction as the simulator notes it: start, end, replica, kind, k."""
_FILL = {Kind.FORWARD: ">", Kind.RECOMPUTE: "o", Kind.BACKWARD: "<"}
_NARROWEST, _WIDEST = 50, 100
"""Characters for a step where lines have to fit."""


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction with its predicted time."""

    rank: int
    instruction: Instruction
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The gradient all-reduce of a stage, on all its ranks."""

    stage: int
    ranks: tuple[int, ...]
    start_seconds: float
    end_seconds: float


class StepSeconds(NamedTuple):
    """Where the seconds of a step go on one rank; the parts add up to the step.

    Attributes:
        step: from the begin of the call (of the first one, if gradients are accumulated) to the end of the optimizer.
        work: its stages compute.
        bubble: it waits for another stage, within the schedule.
        messages: it waits for a message on its way; counted by `Metrics`, it agrees with the others on the call, hands
            out samples and gets outputs.
        sums: after its last instruction it waits for sums of gradients.
        optimizer: the step of the optimizer, with weights that replicas send each other.
        imbalance: it has less work than the busiest rank; `Metrics` counts that as bubble.
        overhead: around what the stages compute; `Metrics` counts that as work.
    """

    step: float
    work: float
    bubble: float
    messages: float
    sums: float
    optimizer: float = 0.0
    imbalance: float = 0.0
    overhead: float = 0.0

    @classmethod
    def of_instructions(
        cls, step: float, spare: float, work: float, messages: float, sums: float, overhead: float, optimizer: float
    ) -> StepSeconds:
        """Returns where a step goes on a rank with `spare` seconds less work than the busiest: the rest is idle."""
        idle = max(0.0, step - work - messages - sums - overhead - optimizer)
        imbalance = min(idle, spare)
        return cls(step, work, idle - imbalance, messages, sums, optimizer, imbalance, overhead)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what to call them in a table."""
        idle = {"bubble": self.bubble, "imbalance": self.imbalance, "messages": self.messages, "all-reduce": self.sums}
        return {"work": self.work, **idle, "overhead": self.overhead, "optimizer": self.optimizer}


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        step_seconds: from the first instruction to the end of the last rank.
        overhead_seconds: within each instruction.
        optimizer_seconds: of each rank, after its last instruction and reduction.
    """

    step_seconds: float
    reductions: tuple[AllReduce, ...]
    acts: tuple[list[Act], ...]
    overhead_seconds: float
    optimizer_seconds: tuple[float, ...]

    @cached_property
    def schedule(self) -> Schedule:
        return tuple(
            tuple(Instruction(of.stage, kind, k * of.stride + of.index) for _, _, of, kind, k in acts)
            for acts in self.acts
        )

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every instruction with its time, by rank, then by time."""
        return tuple(
            Event(rank, instruction, act[0], act[1])
            for rank, (acts, row) in enumerate(zip(self.acts, self.schedule, strict=True))
            for act, instruction in zip(acts, row, strict=True)
        )

    @cached_property
    def lost(self) -> tuple[StepSeconds, ...]:
        return tuple(self._account(rank) for rank in range(len(self.acts)))

    def _account(self, rank: int) -> StepSeconds:
        acts = self.acts[rank]
        overhead = self.overhead_seconds * len(acts)
        work = self._busy_seconds[rank] - overhead
        messages = sum(_message_waits(acts))
        ended, mine = acts[-1][1] if acts else 0.0, self._reductions_of[rank]
        sums = sum(max(0.0, each.end_seconds - max(ended, each.start_seconds)) for each in mine)
        spare, optimizer = max(self._busy_seconds) - self._busy_seconds[rank], self.optimizer_seconds[rank]
        return StepSeconds.of_instructions(self.step_seconds, spare, work, messages, sums, overhead, optimizer)

    @cached_property
    def _busy_seconds(self) -> list[float]:
        return [sum(end - start for start, end, *_ in acts) for acts in self.acts]

    @cached_property
    def _reductions_of(self) -> list[list[AllReduce]]:
        found: list[list[AllReduce]] = [[] for _ in self.acts]
        for reduction in self.reductions:
            for rank in reduction.ranks:
                found[rank].append(reduction)
        return found


def _message_waits(acts: list[Act]) -> Iterator[float]:
    """Yields, for each instruction, how long the rank was idle with the awaited message on its way."""
    idle_from = 0.0
    for start, end, replica, kind, k in acts:
        inbox = replica.activations if kind is FORWARD else replica.gradients
        if idle_from < inbox.ready[k] <= start:
            yield inbox.ready[k] - max(idle_from, inbox.sent[k])
        idle_from = end


def ends_of(acts: tuple[list[Act], ...], reductions: tuple[AllReduce, ...]) -> list[float]:
    """Returns when each rank has run its instructions and reductions; its optimizer comes after them."""
    ends = [row[-1][1] if row else 0.0 for row in acts]
    for reduction in reductions:
        for rank in reduction.ranks:
            ends[rank] = max(ends[rank], reduction.end_seconds)
    return ends


def on_shared_cores(simulation: Simulation, cores: float) -> Simulation:
    """Returns the step of ranks that share so many cores: those that are busy at one time divide them evenly.

    As all of them slow down alike, none overtakes another, and time is stretched: b times for ``b * cores`` busy ranks.
    (Processor sharing; Kleinrock, "Time-shared systems: a theoretical treatment", 1967.) In an all-reduce all its ranks
    are busy.
    """
    acts, reductions = simulation.acts, simulation.reductions
    ends = np.array(ends_of(acts, reductions))
    last = ends + simulation.optimizer_seconds
    spans = np.reshape([act[:2] for row in acts for act in row], (-1, 2))
    sums = np.reshape([(each.start_seconds, each.end_seconds) for each in reductions for _ in each.ranks], (-1, 2))
    starts, stops = np.sort(np.concatenate([spans, sums, np.stack([ends, last], 1)]), 0).T
    times = np.unique(np.concatenate([[0.0], starts, stops]))
    num_busy = np.searchsorted(starts, times[:-1], "right") - np.searchsorted(stops, times[:-1], "right")
    num_busy = np.minimum(num_busy, len(acts))  # a rank computes and sums in turns
    stretched = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.maximum(1.0, num_busy / cores))])

    def real(seconds: Any) -> Any:
        return np.interp(seconds, times, stretched).tolist()

    for replica in {id(act[2]): act[2] for row in acts for act in row}.values():
        for inbox in (replica.activations, replica.gradients):
            inbox.ready, inbox.sent = real(inbox.ready), real(inbox.sent)
    places = iter(real(spans))
    return replace(
        simulation,
        step_seconds=max(real(last)),
        reductions=tuple(
            replace(each, start_seconds=real(each.start_seconds), end_seconds=real(each.end_seconds))
            for each in reductions
        ),
        acts=tuple([(*next(places), *act[2:]) for act in row] for row in acts),
        optimizer_seconds=tuple(np.subtract(real(last), real(ends)).tolist()),
    )


def render(simulation: Simulation, columns: int, names: Mapping[int, int] | None = None) -> str:
    """Returns a timeline: one row a rank, time to the right, and what share of the step the rank lost to what.

    A line has so many columns; where those are few the shares are left out. With `names`, by rank, these ranks alone
    are drawn, under other numbers.
    """
    names = dict(enumerate(range(len(simulation.acts)))) if names is None else names
    shares = {rank: f" {_shares(simulation.lost[rank])}" for rank in names}
    margin = len(f"rank {max(names.values())}")
    room = columns - margin - len(" ||")
    width = min(room - max(map(len, shares.values())), _WIDEST)
    if width < _NARROWEST:
        width, shares = max(min(room, _WIDEST), 1), dict.fromkeys(names, "")
    rows = _rows(simulation, width)
    lines = [f"{f'rank {names[rank]}':<{margin}} |{''.join(rows[rank])}|{shares[rank]}" for rank in names]
    meanings = "  ".join(f"{fill} {kind.name.lower()}" for kind, fill in _FILL.items())
    return "\n".join([*lines, f"step {simulation.step_seconds:.6g} s    {meanings}  + all-reduce  . idle"])


def _rows(simulation: Simulation, width: int) -> list[list[str]]:
    columns = width / simulation.step_seconds if simulation.step_seconds > 0 else 0.0
    rows = [["."] * width for _ in simulation.acts]
    for reduction in simulation.reductions:
        for rank in reduction.ranks:
            _paint(rows[rank], reduction.start_seconds * columns, reduction.end_seconds * columns, "+")
    for event in simulation.events:
        start, end = event.start_seconds * columns, event.end_seconds * columns
        _paint(rows[event.rank], start, end, _FILL[event.instruction.kind], str(event.instruction))
    return rows


def _paint(row: list[str], start: float, end: float, fill: str, label: str = "") -> None:
    """Fills the columns of a span, behind its label if that leaves room for one fill character."""
    first, last = round(start), round(end)
    text = label if len(label) < last - first else ""
    row[first:last] = text.ljust(last - first, fill)


def _shares(lost: StepSeconds) -> str:
    return "  ".join(f"{name} {seconds / lost.step:.0%}" for name, seconds in lost.parts.items() if seconds > 0)
