"""Compares plans with what a person would pick, and with RaNNC's rule: simulated step times, the bound beside.

    python benchmarks/plans.py [--ranks 4 8] [--models GPT ...]

Costs are predicted for a GPU (roofline), so that the table is the same everywhere. Every plan is simulated with the
same model of a step. What a person picks gets the best number of micro-batches, the best grid of stages and replicas
that uses all ranks, the better schedule, and recompute where memory asks for it: only the cuts are by rule.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from plan_models import SUBJECTS, Subject

from autovaruna.graph.call import describe
from autovaruna.graph.records import Graph
from autovaruna.graph.trace import trace
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.partition import partition_chain
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.planner.search_space import micro_batch_counts
from autovaruna.planner.stage_memory import StageBytes
from autovaruna.profiler.records import Cluster, Profile
from autovaruna.profiler.roofline import optimizer_cost, predict, read_device

BATCH = 64
SIZES = (1, 4, 16)
ADAM_FACTOR = 2.0
TIGHT = 0.6
"""The share of the memory of one rank's whole model that a rank has, so that none holds it all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a plan of ours is slower than another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--models", nargs="+", default=[subject.name for subject in SUBJECTS])
    options = parser.parse_args(arguments)
    ways = ("equal layers", "equal parameters", "equal FLOPs", "RaNNC's rule")
    print("seconds of each over ours; bound: ours over the bound")
    print(
        f"{'model':<9} {'N':>2} {'memory':>6} {'ours ms':>8} {'plan':<28} "
        + " ".join(f"{w:>16}" for w in ways)
        + "  bound"
    )
    worst = 1.0
    for subject in (subject for subject in SUBJECTS if subject.name in options.models):
        graph, profile = traced(subject)
        for num_ranks, share in itertools.product(options.ranks, (0.0, TIGHT)):
            problem = problem_of(graph, profile, num_ranks, share)
            plan = make_plan(problem)
            ratios = {way: step / plan.predicted_seconds for way, step in others(problem).items()}
            worst = min([worst, *ratios.values()])
            cells = " ".join(
                f"{ratios[way]:>16.3f}" if ratios[way] < float("inf") else f"{'none fits':>16}" for way in ways
            )
            print(
                f"{subject.name:<9} {num_ranks:>2} {'tight' if share else 'ample':>6} "
                f"{1e3 * plan.predicted_seconds:>8.2f} {summary(plan):<28} {cells} {1 + plan.gap:>6.3f}",
                flush=True,
            )
    return 0 if worst > 0.9999 else 1


def traced(subject: Subject) -> tuple[Graph, Profile]:
    """Traces a model, with no memory for its parameters, and predicts what its blocks cost."""
    with torch.device("meta"):
        model = subject.build()
    device = read_device("a100")
    graph = trace(model, describe(model, subject.batch(4), {})[1], torch.device("cpu"))
    return graph.graph, predict(graph, model, SIZES, device)


def problem_of(graph: Graph, profile: Profile, num_ranks: int, share: float) -> Problem:
    """Returns the problem on one host of GPUs; `share` of what one rank would need is its memory (0: ample)."""
    device = read_device("a100")
    cluster = Cluster(
        hosts=("host",) * num_ranks,
        memory_bytes=(1e15,) * num_ranks,
        speeds=(1.0,) * num_ranks,
        local_link=device.local_link.cost,
        remote_link=device.remote_link.cost,
        all_reduce_bytes_per_second=device.all_reduce.local_bytes_per_second,
        all_reduce_latency_seconds=device.all_reduce.latency_seconds,
        overhead_seconds=5e-5,
    )
    problem = Problem(graph, profile, cluster, BATCH, ADAM_FACTOR, optimizer_cost(device, ADAM_FACTOR))
    if not share:
        return problem
    limits = (share * one_rank_bytes(problem),) * num_ranks
    return replace(problem, cluster=replace(cluster, memory_bytes=limits))


def planner_of(problem: Problem) -> Planner:
    """Returns a planner that may cut between all blocks."""
    return Planner(problem, RangeTables(problem.graph, range(len(problem.graph.blocks) + 1)))


def one_rank_bytes(problem: Problem) -> float:
    """Returns what one rank needs for the whole model, one sample at a time."""
    plan = planner_of(problem).build(Candidate((0,), ((0,),), BATCH))
    assert plan
    return plan.stages[0].memory_bytes


def others(problem: Problem) -> dict[str, float]:
    """Returns the step of each other way of picking, infinite where nothing fits."""
    graph = problem.graph
    parameters = np.zeros(len(graph.blocks))
    for parameter in graph.parameters:
        parameters[parameter.blocks[0]] += parameter.num_bytes
    flops = np.array([block.num_flops_per_sample for block in graph.blocks])
    cutters: dict[str, Callable[[int], tuple[int, ...] | None]] = {
        "equal layers": lambda stages: equal_layers(graph, stages),
        "equal parameters": lambda stages: balanced(parameters, stages),
        "equal FLOPs": lambda stages: balanced(flops, stages),
    }
    found = {name: min(grids(problem, cutter), default=float("inf")) for name, cutter in cutters.items()}
    return found | {"RaNNC's rule": rannc(problem)}


def grids(problem: Problem, cutter: Callable[[int], tuple[int, ...] | None]) -> Iterator[float]:
    """Yields the steps of all grids of stages and replicas that use all ranks, with every number of micro-batches."""
    planner, num_ranks = planner_of(problem), problem.cluster.num_ranks
    for stages in (count for count in range(1, num_ranks + 1) if num_ranks % count == 0):
        starts, each = cutter(stages), num_ranks // stages
        ranks = tuple(tuple(range(s * each, (s + 1) * each)) for s in range(stages))
        for count in micro_batch_counts(problem) if starts else ():
            for schedule in ("1f1b", "gpipe"):
                yield step(planner, Candidate(starts or (), ranks, count, "textbook", schedule))


def step(planner: Planner, candidate: Candidate) -> float:
    """Returns the predicted step of a candidate, infinite if it does not fit."""
    plan = planner.build(candidate)
    return planner.predict_whole(plan).predicted_seconds if plan else float("inf")


def equal_layers(graph: Graph, num_stages: int) -> tuple[int, ...] | None:
    """Returns the first blocks of stages with equally many layers (numbered modules); others go along."""
    names = [re.match(r"(.*?\.\d+)(\.|$)", block.module) for block in graph.blocks]
    firsts = list({match.group(1): k for k, match in reversed(list(enumerate(names))) if match}.values())[::-1]
    if len(firsts) < num_stages:
        return None
    return (0, *(sorted(firsts)[len(firsts) * s // num_stages] for s in range(1, num_stages)))


def balanced(weights: np.ndarray, num_stages: int) -> tuple[int, ...] | None:
    """Returns the first blocks of the stages whose greatest weight is least."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    return partition_chain([np.maximum(total[None, :] - total[:, None], 0.0)] * num_stages)


def rannc(problem: Problem) -> float:
    """Returns the step of RaNNC's rule, infinite if nothing fits.

    The first power of two of stages that fits into memory; replicas and micro-batches are powers of two, all ranks are
    used; among those the least greatest forward plus greatest backward of a stage, times the steps of the pipeline.
    Recompute is for all stages or none, backwards begin after all forwards.
    """
    planner, num_ranks = planner_of(problem), problem.cluster.num_ranks
    powers = [1 << k for k in range(num_ranks.bit_length()) if 1 << k <= num_ranks]
    for num_stages in powers:
        choices: list[tuple[float, Candidate]] = []
        for replicas in itertools.product(powers, repeat=num_stages):
            if sum(replicas) == num_ranks:
                choices += _rannc_choices(planner, problem, replicas)
        for _, candidate in sorted(choices, key=lambda choice: choice[0])[:1]:
            return step(planner, candidate)
    return float("inf")


def _rannc_choices(planner: Planner, problem: Problem, replicas: tuple[int, ...]) -> Iterator[tuple[float, Candidate]]:
    """Yields the best cuts for some replicas at each number of micro-batches, with what the rule minimises."""
    ends = list(itertools.accumulate(replicas))
    ranks = tuple(tuple(range(end - count, end)) for end, count in zip(ends, replicas, strict=True))
    batch = problem.global_batch_size
    for count in (1 << k for k in range(batch.bit_length()) if 1 << k <= batch):
        if count < max(replicas):
            continue
        sized = planner.sized(count)
        for num_bytes, work in _recompute_ways(sized):
            shares = [-(-count // number) for number in replicas]
            limit = problem.cluster.memory_bytes[0]
            costs = [
                np.where(num_bytes.at(share) <= limit, work / number, np.inf)
                for share, number in zip(shares, replicas, strict=True)
            ]
            starts = partition_chain(costs)
            candidate = starts and Candidate(starts, ranks, count, "textbook", "gpipe")
            if starts and candidate and planner.build(candidate):
                pairs = itertools.pairwise([*starts, len(work) - 1])
                greatest = max(cost[pair] for cost, pair in zip(costs, pairs, strict=True))
                yield greatest * (count + len(replicas) - 1), candidate


def _recompute_ways(sized: SizedProblem) -> Iterator[tuple[StageBytes[np.ndarray], np.ndarray]]:
    yield from ((num_bytes, work) for work, num_bytes in sized.recompute_options)


def summary(plan: Plan) -> str:
    """Returns a plan in a few signs: replicas of each stage, micro-batches, schedule."""
    replicas = [len(stage.ranks) for stage in plan.stages]
    shape = f"{len(replicas)}x{replicas[0]}" if len(set(replicas)) == 1 else "+".join(map(str, replicas))
    again = sum(stage.needs_recompute for stage in plan.stages)
    return f"{shape} M={plan.num_micro_batches} {plan.schedule}" + (f" R={again}" if again else "")


if __name__ == "__main__":
    raise SystemExit(main())
