"""Checks a schedule against numbered rules, before it runs.

1. There is one row for each rank.
2. It runs to its end, each instruction once. Where one may start is the simulator's to say (`Replica.refresh`): on the
   rank of its stage and micro-batch, in the order of forward, recompute and backward, in ascending order of
   micro-batches for each kind of a stage, so that sums of gradients have one order, and with no more held than may be.
   No rank waits for ever then.
3. A stage recomputes if the plan says so, or if each backward follows its forward.
4. A replica has no more forwards not yet backwarded than its stage's in-flight depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autovaruna.errors import ScheduleError
from autovaruna.schedule.pipeline import BACKWARD, FORWARD, RECOMPUTE, Instruction, Pipeline, Schedule, grid
from autovaruna.schedule.simulator import replay


def check(schedule: Schedule, pipeline: Pipeline) -> None:
    """Checks every rule.

    Raises:
        ScheduleError: a rule is broken; the message prints the grid with the place marked.
    """
    if len(schedule) != pipeline.num_ranks:
        raise ScheduleError(f"rule 1: {len(schedule)} rows for {pipeline.num_ranks} ranks; give one row for each rank")
    try:
        replay(pipeline, schedule)
    except ScheduleError as error:
        raise ScheduleError(f"rule 2: {error}") from None
    for what, rank, position in _broken(schedule, pipeline):
        place = f"rank {rank}, instruction {position}"
        raise ScheduleError(f"{what}; {place}:\n{grid(schedule, {rank: position})}")


def _broken(schedule: Schedule, pipeline: Pipeline) -> Iterator[tuple[str, int, int]]:
    """Yields how rules 3 and 4 are broken, and where: rank and position in its row."""
    recomputing = {act.stage for row in schedule for act in row if act.kind is RECOMPUTE}
    held = Counter[tuple[int, int]]()
    for rank, row in enumerate(schedule):
        before: Instruction | None = None
        for position, act in enumerate(row):
            is_planned = pipeline.recomputes(act.stage)
            if act.kind is RECOMPUTE and not is_planned:
                yield f"rule 3: {act}, but stage {act.stage} does not recompute", rank, position
            forward = Instruction(act.stage, FORWARD, act.micro_batch)
            if act.kind is BACKWARD and is_planned and act.stage not in recomputing and before != forward:
                yield f"rule 3: {act} has no recompute and does not directly follow its forward", rank, position
            before = act
            held[rank, act.stage] += (act.kind is FORWARD) - (act.kind is BACKWARD)
            depth = pipeline.stages[act.stage].in_flight
            if pipeline.needs_gradients and held[rank, act.stage] > depth:
                yield f"rule 4: {act} is in flight beyond the plan's depth of {depth}", rank, position
