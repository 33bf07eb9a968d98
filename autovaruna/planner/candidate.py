"""Turns one point of the search, a `Candidate`, into a plan: memory, recompute, depths, times, prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autovaruna.planner.costs import Array, costs_at
from autovaruna.planner.cycles import cycle_seconds, is_plain
from autovaruna.planner.memory import Holdings
from autovaruna.planner.pipeline import pipeline_of, policy_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import BlockBytes, Plan, StagePlan
from autovaruna.planner.sized import Sized
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule import Pipeline, Policy, latency_depth, lower_bound, simulate, textbook_depth

_ACTS_OF_A_BOUND = 50
"""What a bound costs, for each stage, counted in acts of the simulator."""
_ACTS_OF_A_CANDIDATE = 100
_ACTS_OF_A_CYCLE, _ACTS_OF_A_PLAIN_STEP = 10, 40_000
_ACTS_OF_A_SHORT_STEP = 20_000
_ACTS_OF_A_WHOLE_STEP = 1_000_000
SECONDS_OF_AN_ACT = 4e-6
DEPTHS = {"textbook": textbook_depth, "latency": latency_depth}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Where the stages start (in segments), their ranks, and M; `depth` and `schedule` are names."""

    starts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    num_micro_batches: int
    depth: str = "textbook"
    schedule: str = "1f1b"


@dataclass(frozen=True, slots=True)
class _Option:
    """A stage of a candidate while its recompute and depth are still open; the depth goes down to `least_in_flight`."""

    held: Holdings[float]
    ranks: tuple[int, ...]
    in_flight: int
    least_in_flight: int
    needs_recompute: bool


class Planner:
    """Builds and predicts the plans of one problem; counts what that costs."""

    def __init__(self, problem: Problem, tables: RangeTables) -> None:
        self.problem, self.tables = problem, tables
        self.num_acts = 0
        hosts = problem.cluster.hosts
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self.host_of = tuple(numbers[host] for host in hosts) if len(numbers) > 1 else ()
        self.sized = lru_cache(maxsize=4)(lambda count: Sized(problem, tables, count))
        self.tied = [p for p in problem.graph.parameters if p.needs_gradient and len(p.blocks) > 1]

    @property
    def spent_seconds(self) -> float:
        """What simulations took so far, counted, not measured, so that it is the same everywhere."""
        return self.num_acts * SECONDS_OF_AN_ACT

    def count_candidate(self) -> float:
        """Counts a candidate that is looked at, and returns `spent_seconds`."""
        self.num_acts += _ACTS_OF_A_CANDIDATE
        return self.spent_seconds

    def step_costs(self, candidate: Candidate) -> float:
        """Returns what the simulation of a candidate takes at least, counted as `spent_seconds` is."""
        parts = math.gcd(*(len(ranks) for ranks in candidate.ranks))
        count = candidate.num_micro_batches / parts
        num_acts = 2 * count * len(candidate.ranks)
        is_quick = num_acts > _ACTS_OF_A_PLAIN_STEP and all(len(ranks) == parts for ranks in candidate.ranks)
        return (_ACTS_OF_A_CYCLE * count if is_quick else num_acts) * SECONDS_OF_AN_ACT

    def build(self, candidate: Candidate) -> Plan | None:
        """Returns the plan of a candidate without a prediction, or None if it does not fit into memory."""
        sized = self.sized(candidate.num_micro_batches)
        options = self._fit(sized, self._options(sized, candidate))
        if options is None:
            return None
        cluster, problem = self.problem.cluster, self.problem
        reduce = self._reduce_seconds(sized, candidate, options)
        return Plan(
            stages=tuple(self._stage(sized, candidate, s, option, reduce[s]) for s, option in enumerate(options)),
            num_ranks=cluster.num_ranks,
            num_micro_batches=candidate.num_micro_batches,
            micro_batch_size=sized.micro_batch_size,
            schedule=candidate.schedule,
            local_link=cluster.local_link,
            remote_link=cluster.remote_link,
            host_of=self.host_of,
            overhead_seconds=cluster.overhead_seconds,
            needs_gradient=problem.needs_gradient,
        )

    def step_seconds(self, num_micro_batches: int) -> Array:
        """Returns forward and backward seconds of each block for one micro-batch."""
        return Sized(self.problem, self.tables, num_micro_batches).step_seconds

    def pipeline(self, plan: Plan) -> Pipeline:
        """Returns the plan as the simulator sees it."""
        return pipeline_of(plan, self.problem.graph)

    def bound(self, plan: Plan) -> float:
        """Returns seconds that the stages of a plan cannot beat with any depths and any schedule."""
        self.num_acts += _ACTS_OF_A_BOUND * plan.num_stages
        return lower_bound(fold(self.pipeline(plan)))

    def predict(self, plan: Plan, below: float = float("inf")) -> Plan | None:
        """Returns the plan with its predicted seconds, or None if it is not faster than `below`."""
        seconds = self._step_seconds(fold(self.pipeline(plan)), policy_of(plan.schedule))
        return replace(plan, predicted_seconds=seconds) if seconds < below else None

    def _step_seconds(self, pipeline: Pipeline, policy: Policy) -> float:
        """Simulates a step; of a long one two shorter ones that end alike, since its middle repeats itself.

        Where even these are long, and the order of instructions is plain, that order alone says the seconds.
        """
        counts = [stage.num_replicas for stage in pipeline.stages]
        period, warm = math.lcm(*counts), (3 if max(counts) == 1 else 8) * sum(counts)
        repeats = (pipeline.num_micro_batches - warm) // period
        extra = -(-(1 if max(counts) == 1 else 4) * sum(counts) // period)
        if repeats <= 3 * extra or 2 * pipeline.num_micro_batches * len(counts) <= _ACTS_OF_A_SHORT_STEP:
            if 2 * pipeline.num_micro_batches * len(counts) > _ACTS_OF_A_PLAIN_STEP and is_plain(pipeline, policy):
                self.num_acts += _ACTS_OF_A_CYCLE * pipeline.num_micro_batches
                return cycle_seconds(pipeline)
            return self._simulate(pipeline, policy)
        short = pipeline.num_micro_batches - repeats * period
        once, more = (
            self._simulate(replace(pipeline, num_micro_batches=count), policy)
            for count in (short, short + extra * period)
        )
        return once + (more - once) * repeats / extra

    def _simulate(self, pipeline: Pipeline, policy: Policy) -> float:
        simulation = simulate(pipeline, policy)
        self.num_acts += sum(len(acts) for acts in simulation.acts)
        return simulation.step_seconds

    def predict_whole(self, plan: Plan) -> Plan:
        """Returns the plan with its predicted seconds, with the links of every rank, unless there are very many."""
        simulation = simulate(short_enough(self.pipeline(plan)), policy_of(plan.schedule))
        return replace(plan, predicted_seconds=simulation.step_seconds)

    def with_block_bytes(self, plan: Plan) -> Plan:
        """Returns the plan with the bytes of each block that its memory was predicted from."""
        size = math.ceil(plan.micro_batch_size - 1e-9)
        costs = costs_at(self.problem.profile, size)
        saved, work = tuple(costs.saved_bytes.tolist()), tuple(costs.work_bytes.tolist())
        model = self.sized(plan.num_micro_batches).model
        return replace(plan, block_bytes=BlockBytes(size, saved, work, model.process_bytes, model.heap_share))

    def _options(self, sized: Sized, candidate: Candidate) -> list[_Option]:
        counts = [len(ranks) for ranks in candidate.ranks]
        first_choice = sized.recompute_choices[0]
        is_fixed = self.problem.constraints.in_flight or candidate.schedule == "gpipe"
        options = []
        for s, ranks in enumerate(candidate.ranks):
            held, depth = _holdings(sized.held, *_range(candidate, s, self.tables)), self._depth(candidate, s, counts)
            options.append(_Option(held, ranks, depth, depth if is_fixed else 1, first_choice))
        return options

    def _depth(self, candidate: Candidate, stage: int, counts: Sequence[int]) -> int:
        share = -(-candidate.num_micro_batches // counts[stage])
        if candidate.schedule == "gpipe":
            return share
        forced = self.problem.constraints.in_flight
        return min(forced or DEPTHS[candidate.depth](len(counts), stage, counts), share)

    def _fit(self, sized: Sized, options: Sequence[_Option]) -> list[_Option] | None:
        """Saves memory where a rank has too little: recompute first, then a smaller depth."""
        ranks = [rank for option in options for rank in option.ranks]
        if len(set(ranks)) < len(ranks):
            return self._fit_together(sized, list(options))
        fitted: list[_Option] = []
        for option in options:
            alone = self._fit_alone(sized, option)
            if alone is None:
                return None
            fitted.append(alone)
        return fitted

    def _fit_alone(self, sized: Sized, option: _Option) -> _Option | None:
        """Fits a stage whose ranks have no other."""
        limit = min(self.problem.cluster.memory_bytes[rank] for rank in option.ranks)
        while _bytes(sized, option) > limit:
            saving = self._saving(sized, option)
            if saving is None:
                return None
            option = saving[2]
        return option

    def _fit_together(self, sized: Sized, options: list[_Option]) -> list[_Option] | None:
        """Fits stages that share ranks."""
        limits = self.problem.cluster.memory_bytes
        while True:
            used = self._bytes_of_ranks(sized, options)
            full = {rank for rank, num_bytes in used.items() if num_bytes > limits[rank]}
            if not full:
                return options
            savings = [self._saving(sized, option) if full & set(option.ranks) else None for option in options]
            best = max((s for s in range(len(options)) if savings[s]), key=lambda s: _gain(savings[s]), default=None)
            if best is None:
                return None
            options[best] = _chosen(savings[best])

    def _bytes_of_ranks(self, sized: Sized, options: Sequence[_Option]) -> dict[int, float]:
        used: dict[int, float] = {}
        for option in options:
            num_bytes = _bytes(sized, option)
            for rank in option.ranks:
                used[rank] = used.get(rank, 0.0) + num_bytes
        return used

    def _saving(self, sized: Sized, option: _Option) -> tuple[int, float, _Option] | None:
        """Returns the next way for a stage to take less memory, with what it saves; recompute goes before depth."""
        now = _bytes(sized, option)
        if not option.needs_recompute and True in sized.recompute_choices:
            other = replace(option, needs_recompute=True)
            if _bytes(sized, other) < now:
                return 1, now - _bytes(sized, other), other
        if option.in_flight > option.least_in_flight:
            other = replace(option, in_flight=option.in_flight - 1)
            return 0, now - _bytes(sized, other), other
        return None

    def _stage(self, sized: Sized, candidate: Candidate, stage: int, option: _Option, reduce: float) -> StagePlan:
        i, j = _range(candidate, stage, self.tables)
        blocks = tuple(range(int(self.tables.positions[i]), int(self.tables.positions[j])))
        costs, cluster = sized.costs, self.problem.cluster
        forward = float(costs.forward_seconds[blocks[0] : blocks[-1] + 1].sum())
        backward = float(costs.backward_seconds[blocks[0] : blocks[-1] + 1].sum())
        speeds = tuple(cluster.speeds[rank] for rank in option.ranks)
        return StagePlan(
            blocks=blocks,
            ranks=option.ranks,
            needs_recompute=option.needs_recompute,
            in_flight=option.in_flight,
            forward_seconds=forward,
            backward_seconds=backward if self.problem.needs_gradient else 0.0,
            memory_bytes=_bytes(sized, option),
            recompute_seconds=forward if option.needs_recompute else 0.0,
            reduce_seconds=reduce,
            optimizer_seconds=float(sized.optimizer_seconds[i, j]),
            parameter_bytes=option.held.parameters,
            speeds=speeds if any(speed != 1.0 for speed in speeds) else (),
        )

    def _reduce_seconds(self, sized: Sized, candidate: Candidate, options: Sequence[_Option]) -> list[float]:
        """Returns the all-reduce seconds of each stage: of its own parameters, and of those it shares with others."""
        if not self.problem.needs_gradient:
            return [0.0] * len(options)
        seconds = [sized.rings.seconds(o.ranks, o.held.trained) if o.held.trained else 0.0 for o in options]
        firsts = self.tables.positions[list(candidate.starts)]
        for parameter in self.tied:
            stages = {int(s) for s in np.searchsorted(firsts, parameter.blocks, side="right") - 1}
            ranks = {rank for stage in stages for rank in options[stage].ranks}
            if len(stages) > 1:
                for stage in stages:
                    seconds[stage] += sized.rings.seconds(ranks, parameter.num_bytes)
        return seconds


def short_enough(pipeline: Pipeline) -> Pipeline:
    """Returns the pipeline, or, if it has too many instructions to simulate all, the part that takes longest."""
    num_acts = 3 * pipeline.num_micro_batches * pipeline.num_stages
    return pipeline if num_acts <= _ACTS_OF_A_WHOLE_STEP else fold(pipeline)


def fold(pipeline: Pipeline) -> Pipeline:
    """Returns the part of a pipeline that takes longest, if the rest runs beside it with the same times.

    If all replica counts are multiples of g, the micro-batches m with equal m mod g never share a rank with others.
    Those with m mod g = 0 are the most. Exact but for links that are not the same in all parts.
    """
    stages = pipeline.stages
    ranks = [rank for stage in stages for rank in stage.ranks]
    parts = math.gcd(*(stage.num_replicas for stage in stages))
    if parts == 1 or len(set(ranks)) < len(ranks) or any(stage.speeds for stage in stages):
        return pipeline
    kept = [rank for stage in stages for rank in stage.ranks[::parts]]
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


def _range(candidate: Candidate, stage: int, tables: RangeTables) -> tuple[int, int]:
    ends = [*candidate.starts[1:], tables.num_segments]
    return candidate.starts[stage], ends[stage]


def _holdings(held: Holdings, i: int, j: int) -> Holdings[float]:  # type: ignore[type-arg]
    return Holdings(**{name: float(getattr(held, name)[i, j]) for name in Holdings.__dataclass_fields__})


def _bytes(sized: Sized, option: _Option) -> float:
    return sized.model.total(option.held, option.in_flight, option.needs_recompute)


def _gain(saving: tuple[int, float, _Option] | None) -> tuple[int, float]:
    assert saving is not None
    return saving[:2]


def _chosen(saving: tuple[int, float, _Option] | None) -> _Option:
    assert saving is not None
    return saving[2]
