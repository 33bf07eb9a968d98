"""Makes synthetic graphs, profiles and clusters."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autovaruna.graph.records import Block, Graph, Input, Parameter, Size, Value
from autovaruna.planner.deployment import Fingerprint, memory_complaint
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.planner.records import Plan
from autovaruna.profiler.records import BlockCost, Cluster, LinkCost, OptimizerCost, Profile

FAST = LinkCost(1e-5, 1e10)


def make_graph(
    num_blocks: int, rng: random.Random | None = None, num_skips: int = 0, num_tied: int = 0, is_loose: bool = False
) -> Graph:
    """A chain, with values that skip ahead and parameters used twice at random places.

    A loose one lacks half of the chain's own values, so that neighbours may have nothing to do with each other.
    """
    rng = rng or random.Random(0)
    blocks = tuple(
        Block(k, f"layers.{k // 2}.part{k % 2}/op_{k}", f"layers.{k // 2}.part{k % 2}", (f"op_{k}",), f"s{k}", 8, 1.0)
        for k in range(num_blocks)
    )
    chain = [Value(f"v{k}", k, (k + 1,), Size(0, rng.randint(1, 50) * 100), True) for k in range(num_blocks - 1)]
    chain = [value for value in chain if not is_loose or rng.random() < 0.5]
    for k in range(num_skips if num_blocks > 2 else 0):
        first = rng.randrange(num_blocks - 2)
        users = sorted(rng.sample(range(first + 1, num_blocks), rng.randint(1, min(3, num_blocks - first - 1))))
        chain.append(Value(f"skip{k}", first, tuple(users), Size(16, rng.randint(1, 50) * 100), rng.random() < 0.7))
    parameters = [Parameter(f"p{k}", rng.randint(1, 100) * 1000, True, (k,)) for k in range(num_blocks)]
    for k in range(num_tied if num_blocks > 1 else 0):
        parameters.append(Parameter(f"tied{k}", 5000, True, tuple(sorted(rng.sample(range(num_blocks), 2)))))
    inputs = (Input("x", (0,), Size(0, 64)), Input("labels", (num_blocks - 1,), Size(0, 8)))
    return Graph(blocks, tuple(chain), inputs, tuple(parameters), f"graph-{num_blocks}-{num_skips}")


def make_profile(graph: Graph, rng: random.Random | None = None, sizes: tuple[int, ...] = (1, 4)) -> Profile:
    """Times of 1 to 10 ms a sample with a fixed part; backward about twice forward."""
    rng = rng or random.Random(1)
    base = [(rng.uniform(1e-3, 1e-2), rng.uniform(1.5, 2.5), rng.randint(1, 20) * 1000) for _ in graph.blocks]
    costs = tuple(
        tuple(BlockCost(f * (0.2 + 0.8 * b), f * r * (0.2 + 0.8 * b), saved * b, 500.0 * b) for f, r, saved in base)
        for b in sizes
    )
    return Profile(graph.fingerprint, "test", sizes, costs)


def make_cluster(num_ranks: int, memory_bytes: float = 1e12, link: LinkCost = FAST) -> Cluster:
    return Cluster(("h",) * num_ranks, (memory_bytes,) * num_ranks, (1.0,) * num_ranks, link, link, 5e9)


def make_problem(num_blocks: int = 6, num_ranks: int = 2, batch: int = 8, seed: int = 0, **more: Any) -> Problem:
    """A problem of random costs; keywords are those of `Constraints`, and `memory_bytes`, `link`, `skips`, `tied`,
    `loose`.
    """
    rng = random.Random(seed)
    graph = make_graph(num_blocks, rng, more.pop("skips", 0), more.pop("tied", 0), more.pop("loose", False))
    cluster = make_cluster(num_ranks, more.pop("memory_bytes", 1e12), more.pop("link", FAST))
    return Problem(graph, make_profile(graph, rng), cluster, batch, 2.0, constraints=Constraints(**more))


def make_uneven(problem: Problem, rng: random.Random, num_hosts: int = 2) -> Problem:
    """The problem on ranks of random hosts, speeds and memory, with slow links, overhead and an optimizer."""
    cluster, num_ranks = problem.cluster, problem.cluster.num_ranks
    links = [LinkCost(1e-5, 1e10), LinkCost(1e-4, 1e7), LinkCost(2e-3, 1e6)]
    local = rng.randrange(len(links))
    uneven = replace(
        cluster,
        hosts=tuple(sorted(rng.choice("abc"[:num_hosts]) for _ in range(num_ranks))),
        memory_bytes=tuple(cluster.memory_bytes[0] * rng.choice([1.0, 1.0, 0.7]) for _ in range(num_ranks)),
        speeds=tuple(rng.choice([1.0, 1.0, 0.6, 1.7]) for _ in range(num_ranks)),
        local_link=links[local],
        remote_link=links[rng.randrange(local, len(links))],
        all_reduce_bytes_per_second=rng.choice([1e10, 2e7]),
        all_reduce_latency_seconds=rng.choice([0.0, 1e-3]),
        overhead_seconds=rng.choice([0.0, 1e-3]),
    )
    cost = OptimizerCost(rng.choice([0.0, 1e-3]), rng.choice([0.0, 1e-8]))
    return replace(problem, cluster=uneven, optimizer_cost=cost)


def on_cluster(problem: Problem, **changes: Any) -> Problem:
    """The problem on ranks that differ in something."""
    return replace(problem, cluster=replace(problem.cluster, **changes))


def constrained(problem: Problem, **changes: Any) -> Problem:
    """The problem of a user who has decided something else."""
    return replace(problem, constraints=replace(problem.constraints, **changes))


def with_memory(problem: Problem, num_bytes: float) -> Problem:
    """The problem on ranks that have so much memory."""
    return on_cluster(problem, memory_bytes=(num_bytes,) * problem.cluster.num_ranks)


def loading_complaint(plan: Plan, problem: Problem, limits: Iterable[float]) -> str:
    """What is said of a plan that is read on ranks with so much memory beside their processes."""
    graph, told = problem.graph.fingerprint, {"optimizer_bytes_factor": problem.optimizer_bytes_factor}
    valid_for = Fingerprint(graph, num_ranks=plan.num_ranks, memory_bytes=tuple(limits), settings=told)
    return memory_complaint(plan, valid_for, problem.graph)
