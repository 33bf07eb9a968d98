"""What the user has decided is obeyed exactly; what contradicts itself is named."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from tests.planner.cases import constrained, make_problem
from tests.products import some


def plan_of(num_blocks: int = 8, num_ranks: int = 3, batch: int = 12, **more: Any) -> Plan:
    return make_plan(make_problem(num_blocks, num_ranks, batch, **more))


def test_cuts_by_block_and_by_module() -> None:
    plan = plan_of(cuts=("layers.1.part1/op_3", "layers.3"))
    assert [stage.blocks[0] for stage in plan.stages] == [0, 3, 6]


@pytest.mark.parametrize(
    "ranks", [((0,), (1, 2)), ((0, 1), (2,)), ((2,), (0,)), ((0,), (1,), (0,), (1,)), ((1, 0), (0, 1)), ((0, 1, 2),)]
)
@pytest.mark.parametrize("with_cuts", [False, True])
def test_stage_ranks(ranks: tuple[tuple[int, ...], ...], with_cuts: bool) -> None:
    cuts = tuple(f"layers.{k}" for k in range(1, len(ranks))) if with_cuts else ()
    problem = make_problem(8, 3, 12, stage_ranks=ranks, cuts=cuts)
    plan = make_plan(problem)
    assert tuple(stage.ranks for stage in plan.stages) == ranks
    assert [stage.blocks[0] for stage in plan.stages] == [0, 2, 4, 6][: len(ranks)] or not with_cuts
    assert 0 < plan.bound_seconds <= plan.predicted_seconds
    num_acts = sum(len(acts) for acts in RankOrders(plan, problem.graph).planned)
    assert num_acts == 2 * len(ranks) * plan.num_micro_batches


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [8, 40])
def test_counts(num_stages: int, num_blocks: int) -> None:
    plan = plan_of(num_blocks, num_ranks=6, num_stages=num_stages, num_replicas=2, num_micro_batches=5)
    assert [len(stage.ranks) for stage in plan.stages] == [2] * num_stages
    assert (plan.num_micro_batches, plan.micro_batch_size) == (5, 12 / 5)


@pytest.mark.parametrize(("num_stages", "num_replicas"), some([(4, 1), (5, 1), (6, 1), (8, 1), (4, 0), (7, 0)], 3))
def test_more_stages_than_ranks_are_several_a_rank(num_stages: int, num_replicas: int) -> None:
    plan = plan_of(num_stages=num_stages, num_replicas=num_replicas)
    assert plan.num_stages == num_stages
    ranks = [stage.ranks for stage in plan.stages]
    assert all(one != other for one, other in pairwise(ranks))
    assert all(len(each) == num_replicas for each in ranks if num_replicas)


def test_stages_are_one_a_rank_if_there_are_ranks_enough_or_that_is_asked_for() -> None:
    for settings in ({"num_stages": 3}, {"max_stages_per_rank": 1}, {"num_stages": 2, "num_replicas": 1}):
        plan = plan_of(num_micro_batches=3, batch=3, **settings)
        ranks = [rank for stage in plan.stages for rank in stage.ranks]
        assert len(set(ranks)) == len(ranks)


def test_depth_recompute_and_schedule() -> None:
    """Gpipe holds all its micro-batches."""
    plan = plan_of(num_stages=3, in_flight=2, recompute="all", schedule="varuna")
    assert {stage.in_flight for stage in plan.stages} == {2}
    assert all(stage.needs_recompute for stage in plan.stages)
    assert plan.schedule == "varuna"
    assert not any(stage.needs_recompute for stage in plan_of(num_stages=3, recompute="none").stages)
    plan = plan_of(num_stages=3, num_micro_batches=6, schedule="gpipe")
    assert [stage.in_flight for stage in plan.stages] == [6, 6, 6]


def test_micro_batch_size_and_a_count_with_which_every_rank_can_pass_its_mini_batch() -> None:
    assert plan_of(batch=12, micro_batch_size=4).num_micro_batches == 3
    assert plan_of(batch=13, micro_batch_size=4).num_micro_batches == 4
    problem = make_problem(4, 3, 12, num_micro_batches=2)
    with pytest.raises(PlanError, match=r"num_micro_batches is 2.*3 ranks"):
        make_plan(replace(problem, min_micro_batches_for_inputs=3))
    free = constrained(problem, num_micro_batches=0)
    assert make_plan(replace(free, min_micro_batches_for_inputs=3)).num_micro_batches >= 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_stages": 2, "cuts": ("layers.1", "layers.2")}, "num_stages asks for 2 stages, cuts asks for 3"),
        ({"num_stages": 2, "stage_ranks": ((0,),)}, "contradict"),
        ({"stage_ranks": ((0,), (3,))}, r"stage_ranks\[1\] is \[3\].*from 0 to 2"),
        ({"stage_ranks": ((0, 0),)}, "different ranks"),
        ({"stage_ranks": ((0,), (1, 2)), "num_replicas": 2}, "num_replicas is 2"),
        ({"num_stages": 9}, "only 8 blocks"),
        ({"num_stages": 4, "max_stages_per_rank": 1}, "4 ranks are needed"),
        ({"num_stages": 7, "max_stages_per_rank": 2}, "7 ranks are needed.*, or 4 with up to 2 stages a rank"),
        ({"num_stages": 2, "num_replicas": 2}, "4 ranks are needed"),
        ({"cuts": ("layers.2", "layers.1")}, "execution order"),
        ({"cuts": ("layers.0",)}, "empty"),
        ({"cuts": ("layer.1",)}, r"nearest are .*layers\.1"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"schedule": "fastest"}, "schedule is 'fastest'.*1f1b"),
        ({"num_micro_batches": 13}, "only 12 samples|12"),
        ({"min_micro_batches": 8, "max_micro_batches": 4}, "no number of micro-batches"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(**settings)


def test_each_number_of_ranks_that_is_named_works() -> None:
    """One rank for seven stages was once told of four stages a rank, which are for two or more."""
    with pytest.raises(PlanError, match=r"7 ranks are needed .*, or 2 with up to 4 stages a rank"):
        plan_of(num_ranks=1, num_stages=7)
    assert all(plan_of(num_ranks=n, num_stages=7, num_micro_batches=4).num_stages == 7 for n in (2, 7))
