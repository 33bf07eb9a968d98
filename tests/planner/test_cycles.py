"""Long plain pipelines: the order of 1F1B alone says what the simulator says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autovaruna.planner import prediction as prediction_module
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.prediction import cycle_seconds, is_plain
from autovaruna.planner.ranges import RangeTables
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.pipeline import Edge, Pipeline, StageTimes
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import simulate
from tests.planner.cases import make_problem

POLICY = POLICIES["1f1b"]


def pipeline(seed: int, spread: float) -> Pipeline:
    dice = random.Random(seed)
    num_stages, count = dice.randint(1, 24), dice.randint(1, 60)
    is_deep = dice.random() < 0.5

    def stage(s: int) -> StageTimes:
        depth = 2 * (num_stages - 1 - s) + 1 if is_deep else num_stages - s
        forward, backward = 1 + spread * dice.random(), 2 + spread * dice.random()
        return StageTimes((s,), forward, backward, min(depth, count), seed % 2 == 0, forward, dice.random())

    edges = tuple(Edge(s, s + 1, 1e6, 2e6) for s in range(num_stages - 1))
    optimizer = tuple(dice.random() for _ in range(num_stages))
    link = LinkCost(0.01, 1e9)
    stages = tuple(stage(s) for s in range(num_stages))
    return Pipeline(stages, edges, num_stages, count, lambda a, b: link, True, 1e-3, optimizer)


@pytest.mark.parametrize(("spread", "tolerance"), [(0.0, 1e-9), (0.5, 3e-2)])
@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_the_simulator_says(seed: int, spread: float, tolerance: float) -> None:
    each = pipeline(seed, spread)
    assert is_plain(each, POLICY)
    assert cycle_seconds(each) == pytest.approx(simulate(each, POLICY).step_seconds, rel=tolerance)


def test_only_where_the_order_can_be_foreseen() -> None:
    each = next(p for p in (pipeline(seed, 0.0) for seed in range(99)) if p.num_stages == 4 and p.num_micro_batches > 8)
    shallow = tuple(replace(stage, in_flight=1) for stage in each.stages)
    assert not is_plain(replace(each, stages=shallow), POLICY)
    assert not is_plain(replace(each, edges=(*each.edges, Edge(0, 3, 1.0, 1.0))), POLICY)
    assert not is_plain(replace(each, edges=each.edges[1:]), POLICY)
    assert not is_plain(replace(each, needs_gradients=False), POLICY)
    assert not is_plain(each, POLICIES["gpipe"])


def test_replicas_of_long_plans_are_one_such_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_module, "_ACTS_OF_A_PLAIN_STEP", 0)
    monkeypatch.setattr(prediction_module, "_ACTS_OF_A_SHORT_STEP", 0)
    problem = make_problem(8, 8, 64)
    planner = Planner(problem, RangeTables(problem.graph, range(9)))
    plan = planner.build(Candidate((0, 2, 4, 6), tuple((s, s + 4) for s in range(4)), 20))
    assert plan
    predicted = planner.predict(plan)
    assert predicted
    assert planner.predictor.num_acts < 20 * 20
    assert predicted.predicted_seconds == pytest.approx(planner.predict_whole(plan).predicted_seconds, rel=2e-2)
