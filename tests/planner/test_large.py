"""Large problems: shortcuts of the search change nothing, and time stays small."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise, product
from typing import Any

import pytest

from autovaruna.planner import prediction as prediction_module
from autovaruna.planner import search_space
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.prediction import policy_of, schedule_by_parts
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.pipeline import Edge, Pipeline, Schedule, StageTimes
from autovaruna.schedule.simulator import simulate
from tests.own_time import takes_at_most
from tests.planner.cases import make_problem, on_cluster
from tests.products import WHOLE, some
from tests.schedule.pipelines import assert_rules


@pytest.mark.parametrize("seed", some(range(8), 4))
def test_a_long_step_is_predicted_from_shorter_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_module, "_ACTS_OF_A_SHORT_STEP", 0)
    rng = random.Random(seed)
    replicas = [rng.randint(1, 3) for _ in range(3)]
    problem = make_problem(9, sum(replicas), 400, seed)
    planner = Planner(problem, RangeTables(problem.graph, range(10)))
    ranks = tuple(tuple(range(first, end)) for first, end in pairwise([0, *accumulate(replicas)]))
    plan = planner.build(Candidate((0, 3, 5), ranks, 399))
    predicted = plan and planner.predict(plan)
    assert plan and predicted
    assert predicted.predicted_seconds == pytest.approx(planner.predict_whole(plan).predicted_seconds, rel=2e-2)


def test_hundreds_of_blocks_on_many_ranks() -> None:
    problem = make_problem(*(300, 64) if WHOLE else (128, 32), 256, memory_bytes=1e7)
    plans = []
    assert takes_at_most(60, lambda: plans.append(make_plan(problem)))
    plan = plans[0]
    assert max(plan.rank_bytes()) <= 1e7
    assert 0 <= plan.gap < 0.5


def test_segments_lose_little_and_keep_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(120, 4, 32, num_stages=4, num_replicas=1, num_micro_batches=16)
    fine = make_plan(problem)
    monkeypatch.setattr(search_space, "MAX_SEGMENTS", 60)
    coarse = make_plan(problem)
    assert coarse.predicted_seconds <= fine.predicted_seconds * 1.01
    assert coarse.bound_seconds <= fine.predicted_seconds


PLACED = [
    ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1, 2, 3), (4, 5), (6, 7)),
    ((0, 1, 2, 3), (4, 5), (2, 1, 0, 3)),
    ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 1, 2)),
]
POLICIES = ["1f1b", "varuna", "interleaved", "gpipe"]


@pytest.mark.parametrize(("ranks", "count", "policy"), some(list(product(PLACED, (2, 5, 24, 26), POLICIES)), 21))
def test_parts_that_run_beside_each_other_are_ordered_by_themselves(ranks: Any, count: int, policy: str) -> None:
    times = [StageTimes(each, 1.0 + 0.3 * s, 2.1 - 0.2 * s, 24, s == 1, 1.0) for s, each in enumerate(ranks)]
    edges = tuple(Edge(s, s + 1, 1e6, 1e6) for s in range(len(ranks) - 1))
    num_ranks = 1 + max(rank for each in ranks for rank in each)
    pipeline = Pipeline(tuple(times), edges, num_ranks, count, lambda source, destination: LinkCost(1e-2, 1e8))
    sizes: list[int] = []

    def schedule_of(part: Pipeline) -> Schedule:
        sizes.append(part.num_ranks)
        return simulate(part, policy_of(policy)).schedule

    schedule = schedule_by_parts(pipeline, schedule_of)
    assert_rules(schedule, pipeline)
    assert schedule == simulate(pipeline, policy_of(policy)).schedule
    assert max(sizes) < num_ranks and len(sizes) <= 2


@pytest.mark.parametrize("num_ranks", some([7, 64], 1))
def test_more_ranks_make_no_plan_slower(num_ranks: int) -> None:
    """Of many ranks for 7 samples a twelfth was once used, which took half as long again as 7 of them."""

    def predicted(count: int) -> float:
        hosts = tuple(f"host{rank // 8}" for rank in range(count))
        problem = on_cluster(make_problem(8, count, num_ranks), hosts=hosts, remote_link=LinkCost(1e-4, 1e9))
        problem = on_cluster(problem, all_reduce_bytes_per_second=1e9, all_reduce_latency_seconds=1e-3)
        return make_plan(problem).predicted_seconds

    assert predicted(1000 if WHOLE else 300) <= predicted(num_ranks) * 1.001
