"""Checks a schedule against numbered rules, before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from autovaruna.errors import ScheduleError
from autovaruna.schedule.pipeline import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Instruction, Pipeline, Schedule, grid
from autovaruna.schedule.simulator import replay

Broken = Iterator[tuple[str, int, int]]
"""How a rule is broken, in words, and where: rank and position in its row."""


def check(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks every rule.

    Raises:
        ScheduleError: a rule is broken; the message prints the grid with the place marked.
    """
    if len(schedule) != pipeline.num_ranks:
        raise ScheduleError(f"rule 1: {len(schedule)} rows for {pipeline.num_ranks} ranks; give one row for each rank")
    for number, rule in RULES.items():
        for what, rank, position in rule(schedule, pipeline):
            place = f"rank {rank}, instruction {position}"
            raise ScheduleError(f"rule {number}: {what}; {place}:\n{grid(schedule, {rank: position})}")
    try:
        replay(pipeline, schedule)
    except ScheduleError as error:
        raise ScheduleError(f"rule 4: {error}") from None


def placement(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """There is one row for each rank, and a rank holds only instructions of its own stages and micro-batches."""
    for act, rank, position in _places(schedule):
        if not (0 <= act.stage < pipeline.num_stages and 0 <= act.micro_batch < pipeline.num_micro_batches):
            yield f"{act} is not of this plan", rank, position
        owner = pipeline.rank_of(act.stage, act.micro_batch)
        if owner != rank:
            yield f"rank {rank} has {act}, which is rank {owner}'s", rank, position


def recomputes(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """A stage recomputes if the plan says so, or if each backward follows its forward, weight gradients aside."""
    recomputing = {act.stage for row in schedule for act in row if act.kind is RECOMPUTE}
    for act, rank, position in _places(schedule):
        if act.kind is RECOMPUTE and not pipeline.recomputes(act.stage):
            yield f"{act}, but stage {act.stage} does not recompute", rank, position
        if act.kind is not BACKWARD or not pipeline.recomputes(act.stage) or act.stage in recomputing:
            continue
        if not _follows_forward(act, schedule[rank][:position]):
            yield f"{act} has no recompute and does not directly follow its forward", rank, position


def in_flight(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """A replica has no more forwards not yet backwarded than its stage's in-flight depth."""
    held = Counter[tuple[int, int]]()
    for act, rank, position in _places(schedule):
        held[rank, act.stage] += (act.kind is FORWARD) - (act.kind is BACKWARD)
        depth = pipeline.stages[act.stage].in_flight
        if pipeline.needs_gradients and held[rank, act.stage] > depth:
            yield f"{act} is in flight beyond the plan's depth of {depth}", rank, position


RULES: dict[int, Callable[[Schedule, Pipeline], Broken]] = {1: placement, 2: recomputes, 3: in_flight}
"""Rule 4, the last one checked: the schedule runs to its end, each instruction once.

What an instruction needs to start is the simulator's to say (`Replica.refresh`): the order of forward, recompute,
backward and weight gradients, that each kind of a stage goes in ascending order of micro-batches, so that sums of
gradients have one order, and how many of each may be held. No rank waits for ever then.
"""


def _places(schedule: Schedule) -> Iterator[tuple[Instruction, int, int]]:
    for rank, row in enumerate(schedule):
        for position, act in enumerate(row):
            yield act, rank, position


def _follows_forward(backward: Instruction, before: Sequence[Instruction]) -> bool:
    """Returns whether nothing but weight gradients lies between a backward and its forward."""
    latest = next((act for act in reversed(before) if act.kind is not WEIGHT), None)
    return latest == Instruction(backward.stage, FORWARD, backward.micro_batch)
