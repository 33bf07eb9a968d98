"""The chain partition against all splits there are."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import Array, RangeTables, partition_chain
from autovaruna.planner.splits import ReplicaSearch
from tests.own_time import takes_at_most
from tests.planner.cases import make_problem


def random_costs(rng: random.Random, n: int, share_forbidden: float) -> Array:
    costs = np.array([[rng.uniform(0, 10) for _ in range(n + 1)] for _ in range(n + 1)])
    forbidden = np.array([[rng.random() < share_forbidden for _ in range(n + 1)] for _ in range(n + 1)])
    return np.where(forbidden, np.inf, costs)


def splits(n: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in combinations(range(1, n), num_stages - 1)]


def value(costs: list[Array], starts: tuple[int, ...]) -> float:
    ends = [*starts[1:], costs[0].shape[0] - 1]
    return max(float(stage[i, j]) for stage, i, j in zip(costs, starts, ends, strict=True))


@pytest.mark.parametrize("seed", range(300))
def test_equals_the_best_of_all_splits(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 8)
    num_stages = rng.randint(1, n)
    costs = [random_costs(rng, n, rng.choice([0.0, 0.3])) for _ in range(num_stages)]
    best = min(value(costs, starts) for starts in splits(n, num_stages))
    found = partition_chain(costs)
    assert (found is None) == np.isinf(best)
    if found:
        assert found.objective == best == value(costs, found.starts)


def test_2000_blocks_on_16_stages_take_seconds() -> None:
    rng = np.random.default_rng(0)
    prefix = np.concatenate([[0.0], np.cumsum(rng.uniform(1, 2, 2000))])
    crossing = rng.uniform(0, 5, 2001)
    costs = prefix[None, :] - prefix[:, None] + crossing[:, None] + crossing[None, :]
    found = partition_chain([costs] * 16)
    assert found
    assert found.objective >= prefix[-1] / 16
    assert takes_at_most(5.0, lambda: partition_chain([costs] * 16))


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, total + 1), parts)
    return [tuple(b - a for a, b in zip((0, *end), end, strict=False)) for end in ends]


def brute_value(search: ReplicaSearch, starts: tuple[int, ...], replicas: tuple[int, ...]) -> float:
    ends, used, worst = [*starts[1:], search.sized.tables.num_segments], sum(replicas), 0.0
    for i, j, count in zip(starts, ends, replicas, strict=True):
        worst = max(worst, float(search._costs(used, count)[i, j - i - 1]))
        used -= count
    return worst


@pytest.mark.parametrize("seed", range(60))
def test_cuts_and_replicas_equal_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    memory = rng.choice([1e12, 1.5e6, 8e5])
    problem: Problem = make_problem(rng.randint(2, 6), rng.randint(1, 4), 8, seed, skips=2, memory_bytes=memory)
    n, num_ranks = len(problem.graph.blocks), problem.cluster.num_ranks
    sized = SizedProblem(problem, RangeTables(problem.graph, range(n + 1)), rng.randint(1, 8))
    search = ReplicaSearch(sized, range(num_ranks), range(1, num_ranks + 1), min(n, num_ranks))
    found = {(len(chain.starts), sum(chain.replicas)): chain for chain in search.chains()}
    for num_stages in range(1, min(n, num_ranks) + 1):
        for used in range(num_stages, num_ranks + 1):
            options = [r for r in compositions(used, num_stages) if sum(r) == used]
            best = min(brute_value(search, starts, r) for starts in splits(n, num_stages) for r in options)
            chain = found.get((num_stages, used))
            assert (chain is None) == np.isinf(best)
            if chain:
                assert chain.seconds == best == brute_value(search, chain.starts, chain.replicas)
