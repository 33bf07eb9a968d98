"""Predicts the step of a plan: its pipeline for the simulator, folded where replicas are alike, and a rank's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter

import numpy as np

from autovaruna.errors import PlanError, ScheduleError
from autovaruna.graph.records import Graph
from autovaruna.planner.records import Plan
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.bound import Bounds, lower_bound
from autovaruna.schedule.pipeline import Edge, Instruction, Pipeline, Schedule, StageTimes, pairs_of
from autovaruna.schedule.registry import POLICIES, Policy
from autovaruna.schedule.simulation import Simulation
from autovaruna.schedule.simulator import simulate, simulate_below

_TIMES = attrgetter(*(part.name for part in fields(StageTimes)))
"""What the simulator knows of a stage has the same names in its plan."""
_ACTS_OF_A_WHOLE_STEP = 1_000_000
"""What is longer, some seconds, is simulated in part."""
_ACTS_OF_A_SHARED_ACT = 3
"""What an instruction takes to simulate on a rank with several stages, which has more to choose from."""
_ACTS_OF_A_STAGE = 10
"""What a bound, or the begin of a simulation, takes for each stage."""
_ACTS_OF_A_SHORT_STEP = 20_000
"""What is longer is simulated in two shorter ones, and the memory of its ranks is that of one part."""
_MOST_PARTS = 8
"""Of the parts of a pipeline that run beside each other, over other links, those with the greatest bounds tell."""


class Edges:
    """Finds the edges of plans of one graph, all values at once: a search asks for thousands of plans."""

    def __init__(self, graph: Graph) -> None:
        self.num_blocks = len(graph.blocks)
        holders = [(v, block) for v, value in enumerate(graph.values) for block in (value.producer, *value.consumers)]
        self.values, self.blocks = np.array(holders, dtype=np.int64).reshape(-1, 2).T
        self.fixed_bytes = np.array([value.size.fixed_bytes for value in graph.values], dtype=np.float64)
        self.sample_bytes = np.array([value.size.sample_bytes for value in graph.values], dtype=np.float64)
        self.has_gradient = np.array([value.needs_gradient for value in graph.values], dtype=bool)
        self.between = lru_cache(maxsize=64)(self._between)

    def _between(self, stages: tuple[tuple[int, ...], ...], micro_batch_size: float) -> tuple[Edge, ...]:
        """Returns the edges between stages, of which the blocks are given, for messages of so many samples."""
        stage_of, count = np.empty(self.num_blocks, dtype=np.int64), len(stages)
        for stage, blocks in enumerate(stages):
            is_range = blocks[-1] - blocks[0] + 1 == len(blocks)
            stage_of[slice(blocks[0], blocks[-1] + 1) if is_range else list(blocks)] = stage
        held = np.sort(self.values * count + stage_of[self.blocks])
        values, holders = np.divmod(held, count)
        is_sent = (values[1:] == values[:-1]) & (held[1:] != held[:-1])
        sent = values[1:][is_sent]
        pairs, pair_of = np.unique((holders[:-1] * count + holders[1:])[is_sent], return_inverse=True)
        num_bytes = (self.fixed_bytes + self.sample_bytes * micro_batch_size)[sent]
        has_gradient = self.has_gradient[sent]
        forward = np.bincount(pair_of, num_bytes, len(pairs))
        backward = np.bincount(pair_of, np.where(has_gradient, num_bytes, 0.0), len(pairs))
        goes_back = np.bincount(pair_of, has_gradient, len(pairs)) > 0
        columns = (pairs // count, pairs % count, forward, backward, goes_back)
        return tuple(Edge(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


def pipeline_of(plan: Plan, graph: Graph, edges: Edges | None = None) -> Pipeline:
    """Returns the plan as the simulator sees it. Needs nothing but the plan and the graph: no profile, no cluster."""
    found = (edges or Edges(graph)).between(tuple(stage.blocks for stage in plan.stages), plan.micro_batch_size)
    stages = [StageTimes(*_TIMES(stage)) for stage in plan.stages]
    if plan.remote_link.busy_seconds_per_byte:
        stages = _with_messages(plan, stages, found)
    return Pipeline(
        tuple(stages),
        found,
        plan.num_ranks,
        plan.num_micro_batches,
        plan.link,
        plan.needs_gradient,
        plan.overhead_seconds,
        plan.optimizer_seconds(),
        plan.cores_per_rank,
    )


def _with_messages(plan: Plan, stages: Sequence[StageTimes], edges: Iterable[Edge]) -> list[StageTimes]:
    """Returns stages whose work has in it what messages take of the processors of both ends, on average."""
    forward, backward = [0.0] * len(stages), [0.0] * len(stages)
    for edge in edges:
        busy = _busy_seconds_per_byte(plan, stages[edge.source].ranks, stages[edge.destination].ranks)
        for end in (edge.source, edge.destination):
            forward[end] += busy * edge.forward_bytes
            backward[end] += busy * edge.backward_bytes
    return [
        replace(each, forward_seconds=each.forward_seconds + more, backward_seconds=each.backward_seconds + back)
        for each, more, back in zip(stages, forward, backward, strict=True)
    ]


def _busy_seconds_per_byte(plan: Plan, senders: tuple[int, ...], receivers: tuple[int, ...]) -> float:
    """Returns the mean over the micro-batches that go from some ranks to others."""
    pairs = list(pairs_of(senders, receivers, plan.num_micro_batches))
    return sum(plan.link(a, b).busy_seconds_per_byte for a, b in pairs if a != b) / len(pairs)


def policy_of(name: str) -> Policy:
    """Returns the policy of that name; raises PlanError if there is none."""
    if name not in POLICIES:
        raise PlanError(f"schedule is {name!r}, expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def short_enough(pipeline: Pipeline) -> Pipeline:
    """Returns the pipeline, or, if it is too long to simulate whole, the part that takes longest."""
    num_acts = 3 * pipeline.num_micro_batches * pipeline.num_stages * acts_of_an_act(pipeline)
    return pipeline if num_acts <= _ACTS_OF_A_WHOLE_STEP else fold(pipeline)


def representative(pipeline: Pipeline) -> Pipeline:
    """Returns a pipeline that takes as long, with ranks that hold as much: one part if all are alike, else all of it.

    If that has too many instructions to simulate, it is the part that takes longest.
    """
    return fold(pipeline) if _is_alike(pipeline) else short_enough(pipeline)


def acts_of_an_act(pipeline: Pipeline) -> int:
    """Returns what an instruction costs to simulate, in those of a rank with one stage."""
    is_shared = sum(stage.num_replicas for stage in pipeline.stages) > pipeline.num_ranks
    return _ACTS_OF_A_SHARED_ACT if is_shared else 1


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
    """Returns a schedule in which every part of a pipeline goes as the first one like it."""
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
    return list(dict.fromkeys(rank for stage in pipeline.stages for rank in stage.ranks[place::parts]))


def _keep_apart(pipeline: Pipeline, parts: int) -> bool:
    """Returns whether each rank has the same place, modulo `parts`, in all stages that it holds."""
    places: dict[int, int] = {}
    for ranks in {stage.ranks for stage in pipeline.stages}:
        for place, rank in enumerate(ranks):
            if places.setdefault(rank, place % parts) != place % parts:
                return False
    return True


Dependence = tuple[int, int, bool]
"""Two stages of which the later one needs what the earlier one makes; whether a gradient goes back."""


class RankOrders:
    """The schedules of one plan; raises ScheduleError if it allows none.

    Another call of the model (with layers that were frozen before, or on another path) may have messages that the
    planned one has not. Then ranks that kept the planned order could wait for each other for ever.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.pipeline = pipeline_of(plan, graph)
        self._policy = policy_of(plan.schedule)
        self.planned = schedule_of(self.pipeline, self._policy)

    def along(self, dependences: Iterable[Dependence]) -> Schedule:
        """Returns the schedule of a graph with these dependences: the planned one, if they are among its own."""
        known = {(edge.source, edge.destination): edge for edge in self.pipeline.edges}
        edges = dict(known)
        for source, destination, needs_gradient in dependences:
            edge = edges.get((source, destination)) or Edge(source, destination, 0.0, 0.0, needs_gradient)
            edges[source, destination] = replace(edge, needs_gradient=edge.needs_gradient or needs_gradient)
        if edges == known:
            return self.planned
        pipeline = replace(self.pipeline, edges=tuple(edges.values()))
        try:
            return schedule_of(pipeline, self._policy)
        except ScheduleError:  # its depths were chosen for fewer messages
            return schedule_of(pipeline, policy_of("1f1b"))


def schedule_of(pipeline: Pipeline, policy: Policy) -> Schedule:
    """Returns a policy's schedule, which has been simulated to its end; of parts that run alike, or of a long one, part
    by part.
    """
    if representative(pipeline) is not pipeline:
        return schedule_by_parts(pipeline, lambda part: simulate(part, policy).schedule)
    return simulate(pipeline, policy).schedule


class Predictor:
    """Predicts steps; `num_acts` is what that took so far."""

    def __init__(self) -> None:
        self.num_acts = 0
        self._known: tuple[Pipeline | None, list[Bounds]] = None, []
        self._last: tuple[Pipeline | None, Policy | None, Simulation | None] = None, None, None

    def bound(self, pipeline: Pipeline) -> float:
        """Returns seconds that a pipeline cannot beat with any depths and any schedule."""
        return self._parts(pipeline)[0].lower

    def step_seconds(self, pipeline: Pipeline, policy: Policy, below: float = math.inf) -> float:
        """Simulates a step; of a long one two shorter ones that end alike, since its middle repeats itself.

        Steps that take `below` or longer may come out as infinite.
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
            return self._simulate(pipeline, policy, below, bounds)
        short = pipeline.num_micro_batches - repeats * period
        once = self._simulate(replace(pipeline, num_micro_batches=short), policy)
        longer = replace(pipeline, num_micro_batches=short + extra * period)
        more = self._simulate(longer, policy, once + (below - once) * extra / repeats)
        return once + (more - once) * repeats / extra

    def _parts(self, pipeline: Pipeline) -> list[Bounds]:
        """Returns the bounds of the parts that may take longest, the greatest first; kept for the next question."""
        known, parts = self._known
        if pipeline is not known:
            parts = sorted(map(Bounds, unlike_parts(pipeline)), key=lambda part: -part.lower)
            self.num_acts += _ACTS_OF_A_STAGE * pipeline.num_stages * len(parts)
            parts = parts[:_MOST_PARTS]
            self._known = pipeline, parts
        return parts

    def _simulate(
        self, pipeline: Pipeline, policy: Policy, below: float = math.inf, bounds: Bounds | None = None
    ) -> float:
        found, num_acts = simulate_below(pipeline, policy, below, bounds)
        self.num_acts += _ACTS_OF_A_STAGE * pipeline.num_stages + num_acts * acts_of_an_act(pipeline)
        self._last = pipeline, policy, found
        return found.step_seconds if found else math.inf

    def whole(self, pipeline: Pipeline, policy: Policy, *, is_quick: bool = False) -> tuple[Pipeline, Simulation]:
        """Returns what `representative` makes of a pipeline, simulated; what was simulated last is not simulated again.

        If `is_quick`, the part of the greatest bound is enough, where parts differ and all take long.
        """
        is_long = policy.num_instructions(pipeline) > _ACTS_OF_A_SHORT_STEP
        is_part = (is_quick and is_long) or _is_alike(pipeline)
        part = self._parts(pipeline)[0].pipeline if is_part else short_enough(pipeline)
        last, by, simulation = self._last
        if last is not part or by is not policy or simulation is None:
            self.num_acts += policy.num_instructions(part) * acts_of_an_act(part)
            simulation = simulate(part, policy)
        return part, simulation


def least_acts(counts: list[int], num_micro_batches: int) -> float:
    """Returns the acts that a simulation takes at least, by replicas of each stage and M."""
    return 2 * num_micro_batches / math.gcd(*counts) * len(counts)
