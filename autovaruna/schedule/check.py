"""Checks a schedule against numbered rules, before it runs.

1. There is one row for each rank, and a rank holds only instructions of its own stages and micro-batches.
2. Each stage has one forward and, if there are gradients, one backward for each micro-batch.
3. A stage that recomputes has one recompute for each micro-batch, or none if each backward follows its forward with
   nothing but weight gradients in between; other stages have none.
4. A micro-batch goes forward, recompute, backward.
5. On one rank, each kind of a stage goes in ascending micro-batch order.
6. A replica has no more forwards not yet backwarded than its stage's in-flight depth.
7. A replica holds one recomputed micro-batch at most.
8. The schedule runs to its end: no rank waits for ever.
9. A stage computes weight gradients apart for each micro-batch, after its backward, or for none; only a stage of which
   the plan allows it does so, and no more of them are deferred than the plan allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from autovaruna.errors import ScheduleError
from autovaruna.schedule.instruction import Instruction, Kind, Schedule, grid
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.simulator import replay


def check(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks every rule.

    Raises:
        ScheduleError: a rule is broken; the message prints the grid with the place marked.
    """
    for rule in RULES:
        rule(schedule, pipeline)


def placement(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 1: one row a rank, own stages and micro-batches only."""
    if len(schedule) != pipeline.num_ranks:
        raise ScheduleError(f"rule 1: {len(schedule)} rows for {pipeline.num_ranks} ranks; give one row for each rank")
    for rank, position, act in _places(schedule):
        if not (0 <= act.stage < pipeline.num_stages and 0 <= act.micro_batch < pipeline.num_micro_batches):
            _fail(1, f"{act} is not of this plan", schedule, rank, position)
        owner = pipeline.rank_of(act.stage, act.micro_batch)
        if owner != rank:
            _fail(1, f"rank {rank} has {act}, which is rank {owner}'s", schedule, rank, position)


def completeness(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 2: every forward and every backward, once."""
    found = _once(2, schedule)
    kinds = (Kind.FORWARD, Kind.BACKWARD) if pipeline.needs_gradients else (Kind.FORWARD,)
    for act in _all(pipeline, kinds):
        if act not in found:
            rank = pipeline.rank_of(act.stage, act.micro_batch)
            _fail(2, f"{act} is missing", schedule, rank, len(schedule[rank]))
    for act, (rank, position) in found.items():
        if act.kind is Kind.BACKWARD and not pipeline.needs_gradients:
            _fail(2, f"{act} in a step without gradients", schedule, rank, position)


def recomputes(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 3: recomputes where, and only where, the plan has them."""
    found = {act: (rank, position) for rank, position, act in _places(schedule)}
    recomputing = {act.stage for act in found if act.kind is Kind.RECOMPUTE}
    for act, (rank, position) in found.items():
        if act.kind is Kind.RECOMPUTE and not pipeline.recomputes(act.stage):
            _fail(3, f"{act}, but stage {act.stage} does not recompute", schedule, rank, position)
        if act.kind is not Kind.BACKWARD or not pipeline.recomputes(act.stage):
            continue
        if act.stage in recomputing and _same(act, Kind.RECOMPUTE) not in found:
            _fail(3, f"{act} has no recompute", schedule, rank, position)
        if act.stage not in recomputing and not _follows_forward(act, schedule[rank][:position]):
            _fail(3, f"{act} has no recompute and does not directly follow its forward", schedule, rank, position)


def sequence(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 4: forward, then recompute, then backward."""
    done: set[Instruction] = set()
    for rank, position, act in _places(schedule):
        if act.kind is not Kind.FORWARD and _same(act, Kind.FORWARD) not in done:
            _fail(4, f"{act} comes before its forward", schedule, rank, position)
        if act.kind is Kind.RECOMPUTE and _same(act, Kind.BACKWARD) in done:
            _fail(4, f"{act} comes after its backward", schedule, rank, position)
        done.add(act)


def weights(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 9: weight gradients after their backwards, and not too late."""
    found = {act: (rank, position) for rank, position, act in _places(schedule)}
    splitting = {act.stage for act in found if act.kind is Kind.WEIGHT}
    deferred: dict[tuple[int, int], set[int]] = {}
    for act, (rank, position) in found.items():
        waiting, most = deferred.setdefault((rank, act.stage), set()), pipeline.stages[act.stage].deferred
        if act.kind is Kind.BACKWARD and act.stage in splitting:
            if _same(act, Kind.WEIGHT) not in found:
                _fail(9, f"{act} leaves weight gradients that nothing computes", schedule, rank, position)
            waiting.add(act.micro_batch)
            if len(waiting) > most > 0:
                _fail(9, f"{act} defers weight gradients beyond the plan's {most}", schedule, rank, position)
        if act.kind is Kind.WEIGHT:
            if most == 0 or not pipeline.needs_gradients:
                _fail(9, f"{act}, but stage {act.stage} does not split its backwards", schedule, rank, position)
            if act.micro_batch not in waiting:
                _fail(9, f"{act} comes before its backward", schedule, rank, position)
            waiting.remove(act.micro_batch)


def ascending(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 5: ascending micro-batches, so that sums of gradients have one order."""
    latest: dict[tuple[int, int, Kind], int] = {}
    for rank, position, act in _places(schedule):
        before = latest.get((rank, act.stage, act.kind), -1)
        if act.micro_batch <= before:
            _fail(5, f"{act} comes after micro-batch {before}", schedule, rank, position)
        latest[rank, act.stage, act.kind] = act.micro_batch


def in_flight(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 6: forwards not yet backwarded within the plan's depth."""
    held: dict[tuple[int, int], int] = {}
    for rank, position, act in _places(schedule):
        change = {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(act.kind, 0)
        held[rank, act.stage] = held.get((rank, act.stage), 0) + change
        depth = pipeline.stages[act.stage].in_flight
        if pipeline.needs_gradients and held[rank, act.stage] > depth:
            _fail(6, f"{act} is in flight beyond the plan's depth of {depth}", schedule, rank, position)


def recomputed(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 7: one recomputed micro-batch of a stage at a time."""
    held: dict[tuple[int, int], int | None] = {}
    for rank, position, act in _places(schedule):
        place = rank, act.stage
        if act.kind is Kind.RECOMPUTE:
            if held.get(place) is not None:
                _fail(7, f"{act} while micro-batch {held[place]} is still recomputed", schedule, rank, position)
            held[place] = act.micro_batch
        elif act.kind is Kind.BACKWARD:
            held[place] = None


def liveness(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks rule 8: a dry run over all messages ends."""
    try:
        replay(pipeline, schedule)
    except ScheduleError as error:
        raise ScheduleError(f"rule 8: {error}") from None


RULES: tuple[Callable[[Schedule, Pipeline], None], ...] = (
    placement, completeness, recomputes, sequence, ascending, in_flight, recomputed, weights, liveness,
)  # fmt: skip


def _places(schedule: Schedule) -> Iterator[tuple[int, int, Instruction]]:
    for rank, row in enumerate(schedule):
        for position, act in enumerate(row):
            yield rank, position, act


def _same(act: Instruction, kind: Kind) -> Instruction:
    return Instruction(act.stage, kind, act.micro_batch)


def _follows_forward(backward: Instruction, before: Sequence[Instruction]) -> bool:
    """Returns whether nothing but weight gradients lies between a backward and its forward."""
    latest = next((act for act in reversed(before) if act.kind is not Kind.WEIGHT), None)
    return latest == _same(backward, Kind.FORWARD)


def _all(pipeline: Pipeline, kinds: tuple[Kind, ...]) -> Iterator[Instruction]:
    for stage in range(pipeline.num_stages):
        for kind in kinds:
            for micro_batch in range(pipeline.num_micro_batches):
                yield Instruction(stage, kind, micro_batch)


def _once(number: int, schedule: Schedule) -> dict[Instruction, tuple[int, int]]:
    """Returns the place of each instruction, none of which may be there twice."""
    found: dict[Instruction, tuple[int, int]] = {}
    for rank, position, act in _places(schedule):
        if act in found:
            _fail(number, f"{act} is there twice", schedule, rank, position)
        found[act] = rank, position
    return found


def _fail(number: int, what: str, schedule: Schedule, rank: int, position: int) -> NoReturn:
    raise ScheduleError(
        f"rule {number}: {what}; rank {rank}, instruction {position}:\n" + grid(schedule, {rank: position})
    )
