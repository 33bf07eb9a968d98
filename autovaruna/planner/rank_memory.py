"""Predicts the memory of a rank from its instructions, and fits stages into the memory of their ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.records import Peak, Plan, StagePlan, together
from autovaruna.planner.stage_memory import Holdings, MemoryModel, StageBytes
from autovaruna.schedule.pipeline import BACKWARD, FORWARD, Instruction, Pipeline, Schedule


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
        held: what its stages hold.
        pipeline: the plan as it was simulated: with all replicas, or with one for every so many.
        own_process_bytes: of each rank's process, where that is known; `model` has one for all.
    """
    pairs = zip(held, plan.stages, strict=True)
    stages = [model.of_stage(each, stage.needs_recompute, len(stage.ranks)) for each, stage in pairs]
    simulated: dict[int, int] = {}
    held_by: dict[int, dict[int, StageBytes[float]]] = {}
    for s, (stage, times) in enumerate(zip(plan.stages, pipeline.stages, strict=True)):
        together = len(stage.ranks) // len(times.ranks)
        for place, rank in enumerate(stage.ranks):
            simulated[rank] = times.ranks[place // together]
            held_by.setdefault(simulated[rank], {})[s] = stages[s]
    process = model.process_bytes
    peaks = {rank: peak_of_instructions(schedule[rank], own, process) for rank, own in held_by.items()}
    own = own_process_bytes or [process] * plan.num_ranks
    return tuple(peaks.get(simulated.get(rank, -1), process) + more - process for rank, more in enumerate(own))


def peak_of_instructions(
    instructions: Iterable[Instruction], stages: Mapping[int, StageBytes[float]], process_bytes: float
) -> float:
    """Returns the most that a rank holds in a step, in bytes; each of its stages counts the process as its own."""
    peak, begun = sum(stage.least for stage in stages.values()), set[int]()
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
    return peak - (len(stages) - 1) * process_bytes


class Option(NamedTuple):
    """A stage while its recompute and depths are still open.

    The in-flight depth goes down to `least_in_flight`. With `spares_recompute` no stage recomputes if smaller depths
    are enough.
    """

    held: Holdings[float]
    ranks: tuple[int, ...]
    in_flight: int
    least_in_flight: int
    needs_recompute: bool
    spares_recompute: bool = False


Choices = tuple[bool, int]
"""What memory leaves a stage to choose: whether it recomputes, and its in-flight depth."""


def choices_of(stages: Iterable[StagePlan | Option]) -> tuple[Choices, ...]:
    """Returns what the stages chose."""
    return tuple([(stage.needs_recompute, stage.in_flight) for stage in stages])


def is_within(plan: Plan, limits: Sequence[float]) -> bool:
    """Returns whether a plan fits into the limits of its ranks, in bytes."""
    return all(needed <= limit for needed, limit in zip(plan.rank_bytes(), limits, strict=True))


def fit(sized: SizedProblem, options: Sequence[Option], limits: Sequence[float]) -> list[Option] | None:
    """Saves memory where a rank has less than its limit asks for; returns None if there is no way."""
    fitted = list(options)
    for stages, limit in _tightest(options, limits).items():
        found = _holding_less(sized, [fitted[stage] for stage in stages], limit)
        if found is None:
            return None
        for stage, option in zip(stages, found, strict=True):
            fitted[stage] = option
    return fitted


def _tightest(options: Sequence[Option], limits: Sequence[float]) -> dict[tuple[int, ...], float]:
    """Returns the least limit of the ranks that hold the same stages, by these stages."""
    held: dict[int, list[int]] = {}
    for stage, option in enumerate(options):
        for rank in option.ranks:
            held.setdefault(rank, []).append(stage)
    tightest: dict[tuple[int, ...], float] = {}
    for rank, stages in held.items():
        tightest[tuple(stages)] = min(tightest.get(tuple(stages), math.inf), limits[rank])
    return tightest


def peak_of(sized: SizedProblem, option: Option) -> Peak:
    """Returns the peak of a stage on one replica; a search asks for the same ones again and again."""
    held, ranks, in_flight, _, needs_recompute, _ = option
    key = id(held), needs_recompute, in_flight, len(ranks)
    peak = sized.peaks.get(key)
    if peak is None:
        share = -(-sized.num_micro_batches // len(ranks))
        stage = sized.model.of_stage(held, needs_recompute, len(ranks))
        peak = sized.peaks[key] = stage.peak(in_flight, share, sized.model.process_bytes)
    return peak


def _holding_less(sized: SizedProblem, options: list[Option], limit: float) -> list[Option] | None:
    """Fits the stages of a rank: those that save most by it recompute, then depths are lowered; or depths alone."""
    if _total(sized, options) > limit and any(option.spares_recompute for option in options):
        shallow = _with_less_in_flight(sized, options, limit)
        if shallow is not None:
            return shallow
    while _total(sized, options) > limit:
        savings = [_recompute_saving(sized, option) for option in options]
        most = max(range(len(options)), key=savings.__getitem__)
        if savings[most] <= 0:
            return _with_less_in_flight(sized, options, limit)
        options[most] = options[most]._replace(needs_recompute=True)
    return options


def _recompute_saving(sized: SizedProblem, option: Option) -> float:
    if option.needs_recompute or True not in sized.recompute_choices:
        return 0.0
    with_recompute = option._replace(needs_recompute=True)
    return peak_of(sized, option).num_bytes - peak_of(sized, with_recompute).num_bytes


def _with_less_in_flight(sized: SizedProblem, options: list[Option], limit: float) -> list[Option] | None:
    """Lowers the depths to the greatest one that fits for all, and lets stages keep one more where there is room."""
    deepest = max(option.in_flight for option in options)
    depth = deepest - bisect_left(
        range(deepest), True, key=lambda less: _total(sized, _lowered(options, deepest - less)) <= limit
    )
    if depth == 0:
        return None
    fitted = _lowered(options, depth)
    for k, option in enumerate(options):
        more = [*fitted[:k], *_lowered([option], depth + 1), *fitted[k + 1 :]]
        fitted = more if _total(sized, more) <= limit else fitted
    return fitted


def _lowered(options: Iterable[Option], depth: int) -> list[Option]:
    """Returns the options with a depth no greater than given, as far as it may be lowered."""
    return [o._replace(in_flight=min(o.in_flight, max(depth, o.least_in_flight))) for o in options]


def _total(sized: SizedProblem, options: Sequence[Option]) -> float:
    return together(peak_of(sized, option) for option in options)
