"""Predicts the step of a pipeline by simulation, a long one from shorter ones, and counts what that costs."""

from __future__ import annotations

import math
from dataclasses import replace

from autovaruna.planner.predicting.cycles import cycle_seconds, is_plain
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule import Pipeline, Policy, lower_bound, step_seconds

_ACTS_OF_A_BOUND = 50
"""What a bound costs, for each stage, counted in acts of the simulator."""
_ACTS_OF_A_CYCLE, _ACTS_OF_A_PLAIN_STEP = 10, 40_000
_ACTS_OF_A_SHORT_STEP = 20_000
_ACTS_OF_A_WHOLE_STEP = 1_000_000
_ACTS_OF_A_SHARED_ACT = 3
"""A rank with several stages has more to choose from."""
SECONDS_OF_AN_ACT = 4e-6


class Predictor:
    """Predicts steps; `num_acts` is what that took so far."""

    def __init__(self) -> None:
        self.num_acts = 0
        self._folded: tuple[Pipeline | None, Pipeline | None] = None, None

    @property
    def spent_seconds(self) -> float:
        """What simulations took so far, counted, not measured, so that it is the same everywhere."""
        return self.num_acts * SECONDS_OF_AN_ACT

    def bound(self, pipeline: Pipeline) -> float:
        """Returns seconds that a pipeline cannot beat with any depths and any schedule."""
        self.num_acts += _ACTS_OF_A_BOUND * pipeline.num_stages
        return lower_bound(self._fold(pipeline))

    def step_seconds(self, pipeline: Pipeline, policy: Policy, below: float = math.inf) -> float:
        """Simulates a step; of a long one two shorter ones that end alike, since its middle repeats itself.

        Where even these are long, and the order of instructions is plain, that order alone says the seconds.

        Args:
            pipeline: what to simulate.
            policy: the order of its instructions.
            below: steps that take as long or longer may come out as infinite.
        """
        pipeline = self._fold(pipeline)
        counts = [stage.num_replicas for stage in pipeline.stages]
        period, warm = math.lcm(*counts), (3 if max(counts) == 1 else 8) * sum(counts)
        repeats = (pipeline.num_micro_batches - warm) // period
        extra = -(-(1 if max(counts) == 1 else 4) * sum(counts) // period)
        if repeats <= 3 * extra or 2 * pipeline.num_micro_batches * len(counts) <= _ACTS_OF_A_SHORT_STEP:
            if 2 * pipeline.num_micro_batches * len(counts) > _ACTS_OF_A_PLAIN_STEP and is_plain(pipeline, policy):
                self.num_acts += _ACTS_OF_A_CYCLE * pipeline.num_micro_batches
                return cycle_seconds(pipeline)
            return self._simulate(pipeline, policy, below)
        short = pipeline.num_micro_batches - repeats * period
        once = self._simulate(replace(pipeline, num_micro_batches=short), policy)
        longer = replace(pipeline, num_micro_batches=short + extra * period)
        more = self._simulate(longer, policy, once + (below - once) * extra / repeats)
        return once + (more - once) * repeats / extra

    def _fold(self, pipeline: Pipeline) -> Pipeline:
        """Returns `fold` of a pipeline, which is bounded first and then simulated, by one schedule after the other."""
        known, folded = self._folded
        if folded is None or pipeline is not known:
            folded = fold(pipeline)
            self._folded = pipeline, folded
        return folded

    def _simulate(self, pipeline: Pipeline, policy: Policy, below: float = math.inf) -> float:
        """Simulates a step; one that is given up since it takes too long counts as a whole one."""
        self.num_acts += policy.num_instructions(pipeline) * _acts_of_an_act(pipeline)
        return step_seconds(pipeline, policy, below)


def least_seconds(counts: list[int], num_micro_batches: int, *, is_shared: bool) -> float:
    """Returns what the simulation of a step takes at least, counted as `spent_seconds` is.

    Args:
        counts: replicas of each stage.
        num_micro_batches: M.
        is_shared: whether ranks hold several stages.
    """
    parts = math.gcd(*counts)
    count = num_micro_batches / parts
    num_acts = 2 * count * len(counts)
    is_quick = num_acts > _ACTS_OF_A_PLAIN_STEP and all(each == parts for each in counts) and not is_shared
    return (_ACTS_OF_A_CYCLE * count if is_quick else num_acts) * SECONDS_OF_AN_ACT


def short_enough(pipeline: Pipeline) -> Pipeline:
    """Returns the pipeline, or, if it has too many instructions to simulate all, the part that takes longest."""
    num_acts = 3 * pipeline.num_micro_batches * pipeline.num_stages * _acts_of_an_act(pipeline)
    return pipeline if num_acts <= _ACTS_OF_A_WHOLE_STEP else fold(pipeline)


def _acts_of_an_act(pipeline: Pipeline) -> int:
    is_shared = sum(stage.num_replicas for stage in pipeline.stages) > pipeline.num_ranks
    return _ACTS_OF_A_SHARED_ACT if is_shared else 1


def fold(pipeline: Pipeline) -> Pipeline:
    """Returns the part of a pipeline that takes longest, if the rest runs beside it with the same times.

    If all replica counts are multiples of g, and each rank has the same place modulo g in all its stages, the
    micro-batches m with equal m mod g never share a rank with others. Those with m mod g = 0 are the most. Exact but
    for links that are not the same in all parts.
    """
    stages = pipeline.stages
    parts = math.gcd(*(stage.num_replicas for stage in stages))
    if parts == 1 or any(stage.speeds for stage in stages) or not _keep_apart(pipeline, parts):
        return pipeline
    kept = list(dict.fromkeys(rank for stage in stages for rank in stage.ranks[::parts]))
    number = {rank: k for k, rank in enumerate(kept)}
    part = tuple(replace(stage, ranks=tuple(number[rank] for rank in stage.ranks[::parts])) for stage in stages)
    count = -(-pipeline.num_micro_batches // parts)

    def links(source: int, destination: int) -> LinkCost:
        return pipeline.links(kept[source], kept[destination])

    optimizer = tuple(pipeline.optimizer_seconds[rank] for rank in kept) if pipeline.optimizer_seconds else ()
    return replace(
        pipeline,
        stages=part,
        num_ranks=len(kept),
        num_micro_batches=count,
        links=links,
        optimizer_seconds=optimizer,
    )


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
