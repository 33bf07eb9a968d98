"""Builds pipelines for the tests: chains, and random ones of any placement."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import networkx as nx

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.bound import Bounds
from autovaruna.schedule.pipeline import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Edge,
    Instruction,
    Pipeline,
    Schedule,
    StageTimes,
    deepest_in_flight,
    textbook_depth,
)
from autovaruna.schedule.registry import Policy
from autovaruna.schedule.simulator import simulate_below


def chain(
    num_stages: int,
    num_micro_batches: int,
    forward: float = 1.0,
    backward: float = 1.0,
    latency: float = 0.0,
    depth: Callable[[int, int], int] = textbook_depth,
    recompute: float | None = None,
) -> Pipeline:
    """Returns equal stages, one a rank, each joined to the next."""
    stages = [
        StageTimes((s,), forward, backward, depth(num_stages, s), recompute is not None, recompute or 0.0)
        for s in range(num_stages)
    ]
    edges = [Edge(s, s + 1, 0.0, 0.0) for s in range(num_stages - 1)]
    link = LinkCost(latency, float("inf"))
    return Pipeline(tuple(stages), tuple(edges), num_stages, num_micro_batches, lambda source, destination: link)


def placed(pipeline: Pipeline, placement: list[tuple[int, ...]], num_ranks: int) -> Pipeline:
    stages = [dataclasses.replace(s, ranks=ranks) for s, ranks in zip(pipeline.stages, placement, strict=True)]
    return dataclasses.replace(pipeline, stages=tuple(stages), num_ranks=num_ranks)


def deepened(pipeline: Pipeline) -> Pipeline:
    stages = [dataclasses.replace(s, in_flight=deepest_in_flight(pipeline, i)) for i, s in enumerate(pipeline.stages)]
    return dataclasses.replace(pipeline, stages=tuple(stages))


def random_pipeline(seed: int) -> Pipeline:
    """Returns stages of any times, depths, replicas and speeds, anywhere on the ranks, with skips and joins."""
    dice = random.Random(seed)
    num_stages, num_ranks = dice.randint(1, 6), dice.randint(1, 5)
    links = {
        (a, b): LinkCost(dice.choice((0.0, 0.3, 2.0)), dice.choice((1.0, 3.0, float("inf"))))
        for a, b in itertools.product(range(num_ranks), repeat=2)
    }
    return Pipeline(
        stages=tuple(_random_stage(dice, num_ranks) for _ in range(num_stages)),
        edges=tuple(_random_edges(dice, num_stages)),
        num_ranks=num_ranks,
        num_micro_batches=dice.randint(1, 8),
        links=lambda source, destination: links[source, destination],
        needs_gradients=dice.random() < 0.85,
        overhead_seconds=dice.choice((0.0, 0.1)),
        optimizer_seconds=dice.choice(((), tuple(dice.random() for _ in range(num_ranks)))),
    )


def _random_stage(dice: random.Random, num_ranks: int) -> StageTimes:
    ranks = tuple(dice.sample(range(num_ranks), dice.randint(1, num_ranks)))
    times = StageTimes(
        ranks=ranks,
        forward_seconds=dice.choice((0.0, 1.0, dice.random())),
        backward_seconds=dice.choice((0.0, 2.0, 2 * dice.random())),
        in_flight=dice.randint(1, 5),
        needs_recompute=dice.random() < 0.5,
        recompute_seconds=dice.random(),
        reduce_seconds=dice.choice((0.0, dice.random())),
        speeds=dice.choice(((), tuple(dice.uniform(0.5, 2.0) for _ in ranks))),
    )
    lead = min(times.reduce_seconds, times.backward_seconds / max(times.speeds, default=1.0))
    return dataclasses.replace(times, reduce_lead_seconds=lead * dice.random())


def _random_edges(dice: random.Random, num_stages: int) -> list[Edge]:
    pairs = [(s, t) for s in range(num_stages) for t in range(s + 1, num_stages)]
    chosen = [(s, t) for s, t in pairs if dice.random() < (0.85 if t == s + 1 else 0.3)]
    return [Edge(s, t, dice.random(), dice.random(), dice.random() < 0.8) for s, t in chosen]


def bound_at_depths(pipeline: Pipeline) -> float:
    """Returns seconds that no schedule can beat with the pipeline's in-flight depths.

    With d in flight, the k-th forward of a replica starts a whole trip of a micro-batch, down and up, after the
    (k - d)-th one did, whatever the order: so many backwards must have ended, and one of them began no sooner.
    """
    paths = Bounds(pipeline)
    least = paths.lower
    for stage, times in enumerate(pipeline.stages if pipeline.needs_gradients else ()):
        for replica in range(times.num_replicas):
            share, work = pipeline.share(stage, replica), paths.on(stage, replica)
            if share:
                trip = work.forward + paths.round_trips[stage] + work.backward
                trips, before = divmod(share - 1, min(times.in_flight, share))
                seconds = paths.heads[stage] + before * work.forward + (trips + 1) * trip + paths.tails[stage]
                least = max(least, seconds)
    return least


def step_seconds(pipeline: Pipeline, policy: Policy, below: float) -> float:
    """Returns the seconds of one step, infinite if it is soon certain that they are not below `below`."""
    found, _ = simulate_below(pipeline, policy, below)
    return found.step_seconds if found else math.inf


def assert_rules(schedule: Schedule, pipeline: Pipeline) -> None:
    """Asserts that each instruction is there once, on its rank, and that no rank can wait for ever.

    Each kind goes in ascending order of micro-batches, so that sums have one order. A stage recomputes if the plan says
    so, or each of its backwards follows its forward at once; a replica holds no more than its in-flight depth.
    """
    gradient, acts = pipeline.needs_gradients, [act for row in schedule for act in row]
    recomputing, stages = {act.stage for act in acts if act.kind is RECOMPUTE}, range(pipeline.num_stages)
    assert all(pipeline.recomputes(stage) for stage in recomputing)
    kinds = {s: [FORWARD, *[RECOMPUTE] * (s in recomputing), *[BACKWARD] * gradient] for s in stages}
    every = [Instruction(s, kind, m) for s in kinds for kind in kinds[s] for m in range(pipeline.num_micro_batches)]
    assert Counter(acts) == Counter(every)
    waits = nx.DiGraph()
    for rank, row in enumerate(schedule):
        assert all(pipeline.rank_of(act.stage, act.micro_batch) == rank for act in row)
        nx.add_path(waits, row)
        held = Counter[int]()
        for before, act in itertools.pairwise([None, *row]):
            held[act.stage] += (act.kind is FORWARD) - (act.kind is BACKWARD)
            assert not gradient or held[act.stage] <= pipeline.stages[act.stage].in_flight
            if act.kind is BACKWARD and pipeline.recomputes(act.stage) and act.stage not in recomputing:
                assert before == Instruction(act.stage, FORWARD, act.micro_batch)
        for s, kind in {(act.stage, act.kind) for act in row}:
            order = [act.micro_batch for act in row if (act.stage, act.kind) == (s, kind)]
            assert order == sorted(order)
    for m in range(pipeline.num_micro_batches):
        for s, own in kinds.items():
            nx.add_path(waits, [Instruction(s, kind, m) for kind in own])
        for edge in pipeline.edges:
            waits.add_edge(Instruction(edge.source, FORWARD, m), Instruction(edge.destination, FORWARD, m))
            if gradient and edge.needs_gradient:
                waits.add_edge(Instruction(edge.destination, BACKWARD, m), Instruction(edge.source, BACKWARD, m))
    assert nx.is_directed_acyclic_graph(waits)
