"""Folds a pipeline whose replicas run beside each other, with the same times, to one of these parts, and back.

If all replica counts are multiples of g, and each rank has the same place modulo g in all its stages, the micro-batches
m with equal m mod g never share a rank with others: these are g pipelines that have nothing to do with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule import Pipeline, Schedule, lower_bound
from autovaruna.schedule.instruction import Instruction

_ACTS_OF_A_WHOLE_STEP = 1_000_000
ACTS_OF_A_SHARED_ACT = 3
"""A rank with several stages has more to choose from."""


def short_enough(pipeline: Pipeline) -> Pipeline:
    """Returns the pipeline, or, if it has too many instructions to simulate all, the part that takes longest."""
    num_acts = 3 * pipeline.num_micro_batches * pipeline.num_stages * acts_of_an_act(pipeline)
    return pipeline if num_acts <= _ACTS_OF_A_WHOLE_STEP else fold(pipeline)


def telling(pipeline: Pipeline) -> Pipeline:
    """Returns a pipeline that takes as long, with ranks that hold as much: one part if all are alike, else all of it.

    If that has too many instructions to simulate, it is the part that takes longest.
    """
    return fold(pipeline) if _is_alike(pipeline) else short_enough(pipeline)


def acts_of_an_act(pipeline: Pipeline) -> int:
    """Returns what an instruction costs to simulate, in those of a rank with one stage."""
    is_shared = sum(stage.num_replicas for stage in pipeline.stages) > pipeline.num_ranks
    return ACTS_OF_A_SHARED_ACT if is_shared else 1


def fold(pipeline: Pipeline) -> Pipeline:
    """Returns the part of a pipeline that takes longest, if the rest runs beside it with the same times.

    Exact where messages take the same links in all parts; else the one of the greatest bound.
    """
    found = unlike_parts(pipeline)
    return found[0] if len(found) == 1 else max(found, key=lower_bound)


def unlike_parts(pipeline: Pipeline) -> list[Pipeline]:
    """Returns the parts of which one takes longest: of those whose links are the same, that of most micro-batches."""
    parts = _num_parts(pipeline)
    return [pipeline] if parts == 1 else [_part(pipeline, parts, place) for place in _unlike_places(pipeline, parts)]


def schedule_by_parts(pipeline: Pipeline, schedule_of: Callable[[Pipeline], Schedule]) -> Schedule:
    """Returns a schedule in which every part of a pipeline goes as the first one like it.

    Args:
        pipeline: The pipeline.
        schedule_of: Makes the schedule of a part.
    """
    parts = _num_parts(pipeline)
    known: dict[tuple[object, int], Schedule] = {}
    rows: list[tuple[Instruction, ...]] = [()] * pipeline.num_ranks
    for place in range(min(parts, pipeline.num_micro_batches)):
        part = _part(pipeline, parts, place)
        key = part.stages, part.num_micro_batches
        if key not in known:
            known[key] = schedule_of(part)
        for rank, row in zip(_ranks_of_part(pipeline, parts, place), known[key], strict=True):
            rows[rank] = tuple([Instruction(act.stage, act.kind, act.micro_batch * parts + place) for act in row])
    return tuple(rows)


def _num_parts(pipeline: Pipeline) -> int:
    """Returns g; 1 if parts share ranks, or may be of other speeds."""
    parts = math.gcd(*(stage.num_replicas for stage in pipeline.stages))
    is_alike = not any(stage.speeds for stage in pipeline.stages) and _keep_apart(pipeline, parts)
    return parts if is_alike else 1


def _is_alike(pipeline: Pipeline) -> bool:
    """Returns whether all parts run as many micro-batches, on ranks with the same stages, over the same links."""
    parts, groups = _num_parts(pipeline), {stage.ranks for stage in pipeline.stages}
    if pipeline.num_micro_batches % parts or len(set().union(*groups)) < sum(map(len, groups)):
        return False
    return parts == 1 or len(_unlike_places(pipeline, parts)) == 1


def _unlike_places(pipeline: Pipeline, parts: int) -> list[int]:
    """Returns the first of all parts whose messages take the same links; the first has the most micro-batches."""
    pairs = {(pipeline.stages[edge.source].ranks, pipeline.stages[edge.destination].ranks) for edge in pipeline.edges}
    lines = [
        (senders[m % len(senders)], receivers[m % len(receivers)], m % parts)
        for senders, receivers in (*pairs, *((b, a) for a, b in pairs))
        for m in range(min(math.lcm(len(senders), len(receivers)), pipeline.num_micro_batches))
    ]
    links: list[list[LinkCost]] = [[] for _ in range(min(parts, pipeline.num_micro_batches))]
    for source, destination, place in lines:
        links[place].append(pipeline.links(source, destination))
    first: dict[tuple[LinkCost, ...], int] = {}
    for place, each in enumerate(links):
        first.setdefault(tuple(each), place)
    return list(first.values())


def _part(pipeline: Pipeline, parts: int, place: int) -> Pipeline:
    """Returns the part of the micro-batches with m mod g = `place`, its ranks numbered from 0 on."""
    kept = _ranks_of_part(pipeline, parts, place)
    number = {rank: k for k, rank in enumerate(kept)}
    optimizer = tuple(pipeline.optimizer_seconds[rank] for rank in kept) if pipeline.optimizer_seconds else ()

    def links(source: int, destination: int) -> LinkCost:
        return pipeline.links(kept[source], kept[destination])

    return replace(
        pipeline,
        stages=tuple(
            [stage.on(tuple([number[rank] for rank in stage.ranks[place::parts]])) for stage in pipeline.stages]
        ),
        num_ranks=len(kept),
        num_micro_batches=len(range(place, pipeline.num_micro_batches, parts)),
        links=links,
        optimizer_seconds=optimizer,
    )


def _ranks_of_part(pipeline: Pipeline, parts: int, place: int) -> list[int]:
    """Returns the ranks of a part, in the order in which its stages have them."""
    return list(dict.fromkeys(rank for stage in pipeline.stages for rank in stage.ranks[place::parts]))


def _keep_apart(pipeline: Pipeline, parts: int) -> bool:
    """Returns whether each rank has the same place, modulo `parts`, in all stages that it holds."""
    groups = {stage.ranks for stage in pipeline.stages}
    if len(set().union(*groups)) == sum(map(len, groups)):  # stages share all their ranks, or none
        return True
    places: dict[int, int] = {}
    for ranks in groups:
        for place, rank in enumerate(ranks):
            if places.setdefault(rank, place % parts) != place % parts:
                return False
    return True
