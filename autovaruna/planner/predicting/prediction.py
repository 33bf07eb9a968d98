"""Predicts the step of a pipeline by simulation, a long one from shorter ones, and counts what that costs."""

from __future__ import annotations

import math
from dataclasses import replace

from autovaruna.planner.predicting.cycles import cycle_seconds, is_plain
from autovaruna.planner.predicting.folding import acts_of_an_act, unlike_parts
from autovaruna.schedule import Bounds, Pipeline, Policy, step_seconds

_ACTS_OF_A_BOUND = 8
"""What a bound costs, for each stage, counted in acts of the simulator."""
_ACTS_OF_A_CYCLE, _ACTS_OF_A_PLAIN_STEP = 10, 40_000
_ACTS_OF_A_SHORT_STEP = 20_000
_MOST_PARTS = 8
"""Of the parts of a pipeline that run beside each other, over other links, those with the greatest bounds tell."""
SECONDS_OF_AN_ACT = 4e-6


class Predictor:
    """Predicts steps; `num_acts` is what that took so far."""

    def __init__(self) -> None:
        self.num_acts = 0
        self._known: tuple[Pipeline | None, list[Bounds]] = None, []

    @property
    def spent_seconds(self) -> float:
        """What simulations took so far, counted, not measured, so that it is the same everywhere."""
        return self.num_acts * SECONDS_OF_AN_ACT

    def bound(self, pipeline: Pipeline) -> float:
        """Returns seconds that a pipeline cannot beat with any depths and any schedule."""
        return self._parts(pipeline)[0].lower

    def step_seconds(self, pipeline: Pipeline, policy: Policy, below: float = math.inf) -> float:
        """Simulates a step; of a long one two shorter ones that end alike, since its middle repeats itself.

        Where even these are long, and the order of instructions is plain, that order alone says the seconds.

        Args:
            pipeline: what to simulate.
            policy: the order of its instructions.
            below: steps that take as long or longer may come out as infinite.
        """
        longest = 0.0
        for part in self._parts(pipeline):
            longest = max(longest, self._seconds_of_part(part, policy, below))
            if longest >= below:
                break
        return longest

    def _seconds_of_part(self, bounds: Bounds, policy: Policy, below: float) -> float:
        pipeline = bounds.pipeline
        counts = [stage.num_replicas for stage in pipeline.stages]
        period, warm = math.lcm(*counts), (3 if max(counts) == 1 else 8) * sum(counts)
        repeats = (pipeline.num_micro_batches - warm) // period
        extra = -(-(1 if max(counts) == 1 else 4) * sum(counts) // period)
        if repeats <= 3 * extra or 2 * pipeline.num_micro_batches * len(counts) <= _ACTS_OF_A_SHORT_STEP:
            if 2 * pipeline.num_micro_batches * len(counts) > _ACTS_OF_A_PLAIN_STEP and is_plain(pipeline, policy):
                self.num_acts += _ACTS_OF_A_CYCLE * pipeline.num_micro_batches
                return cycle_seconds(pipeline)
            return self._simulate(pipeline, policy, below, bounds)
        short = pipeline.num_micro_batches - repeats * period
        once = self._simulate(replace(pipeline, num_micro_batches=short), policy)
        longer = replace(pipeline, num_micro_batches=short + extra * period)
        more = self._simulate(longer, policy, once + (below - once) * extra / repeats)
        return once + (more - once) * repeats / extra

    def _parts(self, pipeline: Pipeline) -> list[Bounds]:
        """Returns the bounds of the parts that may take longest, the greatest first.

        A pipeline is bounded first and then simulated, by one schedule after the other.
        """
        known, parts = self._known
        if pipeline is not known:
            parts = sorted(map(Bounds, unlike_parts(pipeline)), key=lambda part: -part.lower)
            self.num_acts += _ACTS_OF_A_BOUND * pipeline.num_stages * len(parts)
            parts = parts[:_MOST_PARTS]
            self._known = pipeline, parts
        return parts

    def _simulate(
        self, pipeline: Pipeline, policy: Policy, below: float = math.inf, bounds: Bounds | None = None
    ) -> float:
        """Simulates a step; one that is given up since it takes too long counts as a whole one."""
        self.num_acts += policy.num_instructions(pipeline) * acts_of_an_act(pipeline)
        return step_seconds(pipeline, policy, below, bounds)


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
