"""Checks a schedule against numbered rules, before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from autovaruna.errors import ScheduleError
from autovaruna.schedule.pipeline import Instruction, Kind, Pipeline, Schedule, grid
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
        raise ScheduleError(f"rule 8: {error}") from None


def placement(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """There is one row for each rank, and a rank holds only instructions of its own stages and micro-batches."""
    for act, rank, position in _places(schedule):
        if not (0 <= act.stage < pipeline.num_stages and 0 <= act.micro_batch < pipeline.num_micro_batches):
            yield f"{act} is not of this plan", rank, position
        owner = pipeline.rank_of(act.stage, act.micro_batch)
        if owner != rank:
            yield f"rank {rank} has {act}, which is rank {owner}'s", rank, position


def completeness(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """Each stage has one forward and, if there are gradients, one backward for each micro-batch."""
    found = Counter[Instruction]()
    for act, rank, position in _places(schedule):
        found[act] += 1
        if found[act] > 1:
            yield f"{act} is there twice", rank, position
    for stage in range(pipeline.num_stages):
        for kind in (Kind.FORWARD, Kind.BACKWARD) if pipeline.needs_gradients else (Kind.FORWARD,):
            for micro_batch in range(pipeline.num_micro_batches):
                act, rank = Instruction(stage, kind, micro_batch), pipeline.rank_of(stage, micro_batch)
                if act not in found:
                    yield f"{act} is missing", rank, len(schedule[rank])
    for act, rank, position in _places(schedule):
        if act.kind is Kind.BACKWARD and not pipeline.needs_gradients:
            yield f"{act} in a step without gradients", rank, position


def recomputes(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """A stage that recomputes has one recompute for each micro-batch; other stages have none.

    It has none at all if each backward follows its forward with nothing but weight gradients in between.
    """
    found = {act for row in schedule for act in row}
    recomputing = {act.stage for act in found if act.kind is Kind.RECOMPUTE}
    for act, rank, position in _places(schedule):
        if act.kind is Kind.RECOMPUTE and not pipeline.recomputes(act.stage):
            yield f"{act}, but stage {act.stage} does not recompute", rank, position
        if act.kind is not Kind.BACKWARD or not pipeline.recomputes(act.stage):
            continue
        if act.stage in recomputing and _same(act, Kind.RECOMPUTE) not in found:
            yield f"{act} has no recompute", rank, position
        if act.stage not in recomputing and not _follows_forward(act, schedule[rank][:position]):
            yield f"{act} has no recompute and does not directly follow its forward", rank, position


def sequence(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """A micro-batch goes forward, recompute, backward."""
    done: set[Instruction] = set()
    for act, rank, position in _places(schedule):
        if act.kind is not Kind.FORWARD and _same(act, Kind.FORWARD) not in done:
            yield f"{act} comes before its forward", rank, position
        if act.kind is Kind.RECOMPUTE and _same(act, Kind.BACKWARD) in done:
            yield f"{act} comes after its backward", rank, position
        done.add(act)


def ascending(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """On one rank, each kind of a stage goes in ascending order of micro-batches: sums of gradients have one order."""
    latest: dict[tuple[int, int, Kind], int] = {}
    for act, rank, position in _places(schedule):
        before = latest.get((rank, act.stage, act.kind), -1)
        if act.micro_batch <= before:
            yield f"{act} comes after micro-batch {before}", rank, position
        latest[rank, act.stage, act.kind] = act.micro_batch


def in_flight(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """A replica has no more forwards not yet backwarded than its stage's in-flight depth."""
    held = Counter[tuple[int, int]]()
    for act, rank, position in _places(schedule):
        held[rank, act.stage] += (act.kind is Kind.FORWARD) - (act.kind is Kind.BACKWARD)
        depth = pipeline.stages[act.stage].in_flight
        if pipeline.needs_gradients and held[rank, act.stage] > depth:
            yield f"{act} is in flight beyond the plan's depth of {depth}", rank, position


def recomputed(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """A replica holds one recomputed micro-batch at most."""
    held: dict[tuple[int, int], int | None] = {}
    for act, rank, position in _places(schedule):
        place = rank, act.stage
        if act.kind is Kind.RECOMPUTE:
            if held.get(place) is not None:
                yield f"{act} while micro-batch {held[place]} is still recomputed", rank, position
            held[place] = act.micro_batch
        elif act.kind is Kind.BACKWARD:
            held[place] = None


def weights(schedule: Schedule, pipeline: Pipeline) -> Broken:
    """A stage computes weight gradients apart for each micro-batch, after its backward, or for none.

    Only a stage of which the plan allows it does so, and no more of them are deferred than the plan allows.
    """
    found = {act for row in schedule for act in row}
    splitting = {act.stage for act in found if act.kind is Kind.WEIGHT}
    deferred: dict[tuple[int, int], set[int]] = {}
    for act, rank, position in _places(schedule):
        waiting, most = deferred.setdefault((rank, act.stage), set()), pipeline.stages[act.stage].deferred
        if act.kind is Kind.BACKWARD and act.stage in splitting:
            if _same(act, Kind.WEIGHT) not in found:
                yield f"{act} leaves weight gradients that nothing computes", rank, position
            waiting.add(act.micro_batch)
            if len(waiting) > most > 0:
                yield f"{act} defers weight gradients beyond the plan's {most}", rank, position
        if act.kind is Kind.WEIGHT:
            if most == 0 or not pipeline.needs_gradients:
                yield f"{act}, but stage {act.stage} does not split its backwards", rank, position
            if act.micro_batch not in waiting:
                yield f"{act} comes before its backward", rank, position
            waiting.remove(act.micro_batch)


RULES: dict[int, Callable[[Schedule, Pipeline], Broken]] = {
    1: placement, 2: completeness, 3: recomputes, 4: sequence, 5: ascending, 6: in_flight, 7: recomputed, 9: weights,
}  # fmt: skip
"""Rule 8, the last one checked: the schedule runs to its end, so that no rank waits for ever."""


def _places(schedule: Schedule) -> Iterator[tuple[Instruction, int, int]]:
    for rank, row in enumerate(schedule):
        for position, act in enumerate(row):
            yield act, rank, position


def _same(act: Instruction, kind: Kind) -> Instruction:
    return Instruction(act.stage, kind, act.micro_batch)


def _follows_forward(backward: Instruction, before: Sequence[Instruction]) -> bool:
    """Returns whether nothing but weight gradients lies between a backward and its forward."""
    latest = next((act for act in reversed(before) if act.kind is not Kind.WEIGHT), None)
    return latest == _same(backward, Kind.FORWARD)
