"""The memory of a rank, from its instructions: what its stages hold together, moment by moment."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autovaruna.log import readable
from autovaruna.planner.rank_memory import peak_of_instructions
from autovaruna.planner.records import Peak, together
from autovaruna.planner.search import make_plan, plan_and_choices
from autovaruna.planner.stage_memory import StageBytes
from autovaruna.planner.table import explain, plan_table
from autovaruna.schedule.pipeline import Instruction, Kind
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import simulate
from tests.planner.cases import loading_complaint, make_problem, on_cluster
from tests.schedule.pipelines import chain, placed

PROCESS = 3.0


def drawn_stage(chance: random.Random) -> StageBytes[float]:
    """A stage as the memory model makes them: what runs and gradients are parts of all, the process is in each."""
    running, gradients, each, rest = (float(chance.randint(0, 9)) for _ in range(4))
    once = rest + running + gradients + PROCESS
    first = once - min(gradients, chance.randint(0, 9))
    least = rest + gradients + PROCESS + chance.randint(0, 9)
    return StageBytes(once, each, least, first, running, gradients)


def by_hand(row: tuple[Instruction, ...], stages: dict[int, StageBytes[float]]) -> float:
    peak = sum(stage.least for stage in stages.values())
    for place, now in enumerate(row):
        total = 0.0
        for s, stage in stages.items():
            before = [step.kind for step in row[:place] if step.stage == s]
            in_flight = before.count(Kind.FORWARD) - before.count(Kind.BACKWARD)
            has_begun, runs = Kind.BACKWARD in before, now.stage == s
            in_flight += runs and now.kind is Kind.FORWARD
            if runs and now.kind is Kind.BACKWARD and not has_begun:
                total += stage.first
            else:
                total += stage.once - (not runs) * stage.running - (not has_begun) * stage.gradients
            total += stage.each * in_flight
        peak = max(peak, total)
    return peak - (len(stages) - 1) * PROCESS


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_most_of_any_moment_and_never_above_what_the_depths_allow(seed: int) -> None:
    chance = random.Random(seed)
    num_stages, num_ranks, count = chance.randint(1, 6), chance.randint(1, 3), chance.randint(1, 7)
    recompute = chance.choice((None, 1.0))
    ranks = [(s % num_ranks,) for s in range(num_stages)]
    pipeline = placed(chain(num_stages, count, recompute=recompute), ranks, num_ranks)
    schedule = simulate(pipeline, POLICIES[chance.choice(("1f1b", "interleaved", "varuna"))]).schedule
    every = [drawn_stage(chance) for _ in range(num_stages)]
    for rank in range(min(num_ranks, num_stages)):
        mine = {s: every[s] for s in range(rank, num_stages, num_ranks)}
        found = peak_of_instructions(schedule[rank], mine, PROCESS)
        assert found == by_hand(schedule[rank], mine)
        depths = {s: min(pipeline.stages[s].in_flight, count) for s in mine}
        peaks = [
            Peak(held.at(depths[s], count), held.at(depths[s], count) - held.beside_others(depths[s], count) + PROCESS)
            for s, held in mine.items()
        ]
        assert found <= together(peaks)


def test_what_is_shown_of_a_plan_that_fits_by_its_instructions_is_within_the_limit() -> None:
    """Rows of choices and of stages once showed what depths may need: more than a rank has."""
    problem = make_problem(12, 4, 16, 29, memory_bytes=7e5, max_stages_per_rank=1)
    plan, rows = plan_and_choices(problem)
    assert max(stage.memory_bytes for stage in plan.stages) > 7e5 >= max(max(row.rank_bytes()) for row in rows)
    shown = [str(cell) for cell in plan_table(plan, [""] * plan.num_stages).columns[5].cells]
    assert shown == [readable(plan.rank_bytes()[stage.ranks[0]]) for stage in plan.stages]


def test_a_rank_with_several_stages_takes_less_than_they_would_apart() -> None:
    problem = make_problem(16, 2, 4, num_stages=8, num_micro_batches=4)
    plan = make_plan(problem)
    apart = replace(plan, rank_memory_bytes=())
    of_stages = sum(stage.memory_bytes for stage in plan.stages if 0 in stage.ranks)
    assert plan.rank_bytes()[0] <= apart.rank_bytes()[0] < of_stages
    assert "memory of ranks" in explain(plan, problem.graph)


def test_what_was_chosen_by_its_instructions_is_not_refused_when_it_is_loaded() -> None:
    """Two stages a rank, whose depths may need more than the rank has."""
    problem = make_problem(7, 3, 12, seed=8, num_stages=6, max_stages_per_rank=2)
    limits = (0.8 * max(make_plan(problem).rank_bytes()),) * 3
    plan = make_plan(on_cluster(problem, memory_bytes=limits))
    assert max(replace(plan, rank_memory_bytes=()).rank_bytes()) > limits[0] >= max(plan.rank_bytes())
    assert not loading_complaint(plan, problem, limits)
    assert "need" in loading_complaint(plan, problem, (0.9 * max(plan.rank_bytes()) for _ in limits))
