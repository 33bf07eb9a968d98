"""Predicts the memory of a rank from its instructions, one after the other.

The in-flight depths of stages bound what each of them holds, but stages of one rank seldom reach theirs together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Costs
from autovaruna.planner.memory.holes import Holes, finder_of_holes
from autovaruna.planner.memory.known_memory import KnownMemory
from autovaruna.planner.memory.stage_bytes import StageBytes
from autovaruna.planner.memory.stage_memory import MemoryModel
from autovaruna.planner.records import Plan
from autovaruna.schedule import Instruction, Pipeline, Schedule
from autovaruna.schedule.instruction import BACKWARD, FORWARD, WEIGHT


def bytes_of_ranks(
    graph: Graph,
    plan: Plan,
    costs: Costs,
    model: MemoryModel,
    pipeline: Pipeline,
    schedule: Schedule,
    own_process_bytes: Sequence[float] = (),
    known: KnownMemory | None = None,
    limits: Sequence[float] = (),
) -> tuple[float, ...]:
    """Returns the most that each rank of a plan holds in a step, in bytes: without a stage, its process and its inputs.

    Args:
        graph: what was planned.
        plan: the plan.
        costs: of the blocks, at the size of the greatest micro-batch.
        model: the rules of memory.
        pipeline: the plan as it was simulated: with all replicas, or with one for every so many.
        schedule: the instructions of the pipeline's ranks.
        own_process_bytes: of each rank's process, where that is known; `model` has one for all.
        known: the heaps and stages that other plans of the same problem have asked for.
        limits: of each rank: where one needs more, the holes of others need not be found.
    """
    known = known or KnownMemory()
    held = [known.held_by(graph, costs, stage.blocks) for stage in plan.stages]
    holes_of = finder_of_holes(graph, plan, costs, model, held, schedule, known)
    if holes_of is not None:
        model = replace(model, heap_share=0.0)
    pairs = zip(held, plan.stages, strict=True)
    stages = [model.of_stage(each, stage.needs_recompute) for each, stage in pairs]
    own_inputs = model.has_own_inputs
    more = [own - model.process_bytes for own in own_process_bytes] or [0.0] * plan.num_ranks
    limits = [limit - each for limit, each in zip(limits or [math.inf] * plan.num_ranks, more, strict=True)]
    peaks = peaks_of_ranks(plan, stages, model.process_bytes, pipeline, schedule, holes_of, own_inputs, limits)
    return tuple(peak + each for peak, each in zip(peaks, more, strict=True))


def peaks_of_ranks(
    plan: Plan,
    stages: Sequence[StageBytes[float]],
    process_bytes: float,
    pipeline: Pipeline,
    schedule: Schedule,
    holes_of: Holes | None = None,
    has_own_inputs: bool = True,
    limits: Sequence[float] = (),
) -> tuple[float, ...]:
    """Returns the most that each rank holds in a step, in bytes: without a stage, its process and its inputs.

    Args:
        plan: the plan.
        stages: what each of its stages takes; each counts the process as its own.
        process_bytes: of the process.
        pipeline: the plan as it was simulated: with all replicas, or with one for every so many.
        schedule: the instructions of the pipeline's ranks.
        holes_of: says what a rank holds with the holes of its heap.
        has_own_inputs: whether each rank passes samples of its own; else all pass the same ones.
        limits: of each rank: where one needs more, the holes of others need not be found.
    """
    simulated: dict[int, int] = {}
    held: dict[int, dict[int, StageBytes[float]]] = {}
    for s, (stage, times) in enumerate(zip(plan.stages, pipeline.stages, strict=True)):
        together = len(stage.ranks) // len(times.ranks)
        for place, rank in enumerate(stage.ranks):
            simulated[rank] = times.ranks[place // together]
            held.setdefault(simulated[rank], {})[s] = stages[s]
    peaks = {rank: peak_of_instructions(schedule[rank], own, process_bytes) for rank, own in held.items()}
    if holes_of is not None:
        alike = {frozenset(own): rank for rank, own in reversed(held.items())}
        room = _room(peaks, held, simulated, limits)
        holes = dict.fromkeys(alike, 0.0)
        for own, rank in sorted(alike.items(), key=lambda each: room[each[0]]):
            first, step = (rank, pipeline.num_ranks) if has_own_inputs else (0, 1)
            inputs = range(first, pipeline.num_micro_batches, step)
            holes[own] = holes_of(schedule[rank], own, inputs, peaks[rank]) - peaks[rank]
            if holes[own] > room[own]:
                break
        peaks = {rank: peak + holes[frozenset(held[rank])] for rank, peak in peaks.items()}

    def idle(rank: int) -> float:
        inputs = range(rank, plan.num_micro_batches, plan.num_ranks)
        return process_bytes if holes_of is None else holes_of((), (), inputs, process_bytes)

    return tuple(peaks[simulated[rank]] if rank in simulated else idle(rank) for rank in range(plan.num_ranks))


def _room(
    peaks: Mapping[int, float],
    held: Mapping[int, Mapping[int, object]],
    simulated: Mapping[int, int],
    limits: Sequence[float],
) -> dict[frozenset[int], float]:
    """Returns the least bytes that ranks with the same stages have for holes."""
    room = {frozenset(own): math.inf for own in held.values()}
    for rank, limit in enumerate(limits):
        if rank in simulated:
            own = frozenset(held[simulated[rank]])
            room[own] = min(room[own], limit - peaks[simulated[rank]])
    return room


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
