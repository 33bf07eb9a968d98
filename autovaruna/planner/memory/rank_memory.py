"""Predicts the memory of a rank from its instructions, one after the other.

The in-flight depths of stages bound what each of them holds, but stages of one rank seldom reach theirs together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autovaruna.planner.memory.holdings import Holdings
from autovaruna.planner.memory.stage_bytes import StageBytes
from autovaruna.planner.memory.stage_memory import MemoryModel
from autovaruna.planner.records import Plan
from autovaruna.schedule import Instruction, Pipeline, Schedule
from autovaruna.schedule.instruction import BACKWARD, FORWARD, WEIGHT


def bytes_of_ranks(
    plan: Plan,
    held: Sequence[Holdings[float]],
    model: MemoryModel,
    pipeline: Pipeline,
    schedule: Schedule,
    own_process_bytes: Sequence[float] = (),
) -> tuple[float, ...]:
    """Returns the most that each rank of a plan holds in a step, in bytes: without a stage, its process.

    Args:
        plan: the plan.
        held: what its stages hold.
        model: the rules of memory.
        pipeline: the plan as it was simulated: with all replicas, or with one for every so many.
        schedule: the instructions of the pipeline's ranks.
        own_process_bytes: of each rank's process, where that is known; `model` has one for all.
    """
    pairs = zip(held, plan.stages, strict=True)
    stages = [model.of_stage(each, stage.needs_recompute) for each, stage in pairs]
    own = own_process_bytes or [model.process_bytes] * plan.num_ranks
    peaks = peaks_of_ranks(plan, stages, model.process_bytes, pipeline, schedule)
    return tuple(peak + process - model.process_bytes for peak, process in zip(peaks, own, strict=True))


def peaks_of_ranks(
    plan: Plan, stages: Sequence[StageBytes[float]], process_bytes: float, pipeline: Pipeline, schedule: Schedule
) -> list[float]:
    """Returns the most that each rank holds in a step, in bytes: without a stage, its process.

    Args:
        plan: the plan.
        stages: what each of its stages takes; each counts the process as its own.
        process_bytes: of the process.
        pipeline: the plan as it was simulated: with all replicas, or with one for every so many.
        schedule: the instructions of the pipeline's ranks.
    """
    simulated: dict[int, int] = {}
    held: dict[int, dict[int, StageBytes[float]]] = {}
    for s, (stage, times) in enumerate(zip(plan.stages, pipeline.stages, strict=True)):
        together = len(stage.ranks) // len(times.ranks)
        for place, rank in enumerate(stage.ranks):
            simulated[rank] = times.ranks[place // together]
            held.setdefault(simulated[rank], {})[s] = stages[s]
    peaks = {rank: peak_of_instructions(schedule[rank], own, process_bytes) for rank, own in held.items()}
    return [peaks[simulated[rank]] if rank in simulated else process_bytes for rank in range(plan.num_ranks)]


def peak_of_instructions(
    instructions: Iterable[Instruction], stages: Mapping[int, StageBytes[float]], process_bytes: float
) -> float:
    """Returns the most that a rank holds in a step, in bytes.

    Args:
        instructions: of the rank, in order.
        stages: those of the rank; each counts the process as its own.
        process_bytes: of the process.
    """
    peak = sum(stage.least for stage in stages.values())
    instructions = list(instructions)
    deferring, begun = {each.stage for each in instructions if each.kind is WEIGHT}, set[int]()
    idle = sum(stage.waiting for stage in stages.values())
    for instruction in instructions:
        stage = stages[instruction.stage]
        if instruction.kind is FORWARD:
            idle += stage.each
        if instruction.kind is BACKWARD and instruction.stage not in begun:
            begun.add(instruction.stage)
            peak = max(peak, idle + stage.first - stage.waiting)
            idle += stage.gradients
        else:
            peak = max(peak, idle + stage.running)
        if instruction.kind is BACKWARD:
            idle -= stage.each
        if instruction.stage in deferring and instruction.kind in (BACKWARD, WEIGHT):
            idle += stage.each_deferred if instruction.kind is BACKWARD else -stage.each_deferred
            peak = max(peak, idle)
    return peak - (len(stages) - 1) * process_bytes
