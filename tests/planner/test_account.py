"""What ranks hold, by an account of its own, is no more than what is shown, and that is within their limits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.prediction import pipeline_of, policy_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.schedule.pipeline import BACKWARD, FORWARD, Instruction
from autovaruna.schedule.simulator import simulate
from tests.planner.draws import draw
from tests.products import some


@pytest.mark.parametrize("most_each", [1, 2])
def test_by_an_account_of_its_own_every_rank_has_room(most_each: int) -> None:
    for seed in some(range(40, 52), 6):
        problem = draw(seed, most_each=most_each)
        try:
            plan = make_plan(problem)
        except PlanError:
            continue
        schedule = simulate(pipeline_of(plan, problem.graph), policy_of(plan.schedule)).schedule
        for rank, shown in enumerate(plan.rank_bytes()):
            needed = _most_held(problem, plan, rank, schedule[rank])
            assert needed <= shown * (1 + 1e-9) <= problem.cluster.memory_bytes[rank] * (1 + 2e-9), (seed, rank)


def _most_held(problem: Problem, plan: Plan, rank: int, instructions: Sequence[Instruction]) -> float:
    """What a rank holds at the least: its state, gradients once made, and of each micro-batch what backward needs."""
    costs = problem.cost_table.at(ceil(plan.micro_batch_size - 1e-9))
    held, each, gradients = 0.0, dict[int, float](), dict[int, float]()
    for number, stage in enumerate(plan.stages):
        if rank in stage.ranks:
            inside = set(stage.blocks)
            own = [p for p in problem.graph.parameters if inside & set(p.blocks)]
            gradients[number] = sum(p.num_bytes for p in own)
            held += gradients[number] * (1.0 + problem.optimizer_bytes_factor)
            saved = 0.0 if stage.needs_recompute else sum(costs.saved_bytes[block] for block in inside)
            come = (v for v in problem.graph.values if v.producer not in inside and inside & set(v.consumers))
            each[number] = saved + sum(v.size.at(int(costs.micro_batch_size)) for v in come)
    most, begun = held, set[int]()
    for act in instructions:
        if act.kind is FORWARD:
            held += each[act.stage]
        if act.kind is BACKWARD:
            held += gradients[act.stage] * (act.stage not in begun) - each[act.stage]
            begun.add(act.stage)
        most = max(most, held)
    return most
