"""What a person is shown of plans: the simplest within a share of the fastest, what that gives up, all grids."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autovaruna.log import readable
from autovaruna.planner.one_a_rank import Grid, grids_of
from autovaruna.planner.records import Simplicity
from autovaruna.planner.search import make_plan, plan_and_choices
from autovaruna.planner.table import explain, module_range, plan_table, seconds, summary
from tests.planner.cases import constrained, make_graph, make_problem, with_memory
from tests.products import some


@pytest.mark.parametrize("seed", some(range(12), 6))
def test_the_chosen_plan_is_within_the_share_and_no_grid_there_is_simpler(seed: int) -> None:
    problem = make_problem(10, 4, 12, seed)
    fastest = make_plan(constrained(problem, simplicity=0.0))
    chosen, rows = plan_and_choices(constrained(problem, simplicity=0.02))
    limit = 1.02 * fastest.predicted_seconds
    assert fastest.predicted_seconds <= chosen.predicted_seconds <= limit
    assert Simplicity.of(chosen) <= Simplicity.of(fastest)
    assert all(Simplicity.of(chosen) <= Simplicity.of(row) for row in rows if row.predicted_seconds <= limit)


def test_the_printout_names_what_was_given_up() -> None:
    """Of its plans the fastest has more stages than one that takes hardly longer."""
    problem = make_problem(12, 4, 16, 3, num_replicas=1, max_stages_per_rank=1)
    chosen, fastest = make_plan(constrained(problem, simplicity=0.9)), make_plan(constrained(problem, simplicity=0.0))
    assert chosen.num_stages < fastest.num_stages and chosen.predicted_seconds > fastest.predicted_seconds
    gain = f"{1 - fastest.predicted_seconds / chosen.predicted_seconds:.1%}"
    assert chosen.given_up == f"a plan with {fastest.num_stages} stages is predicted {gain} faster"
    assert chosen.given_up in explain(chosen, problem.graph)
    assert "simplicity" not in explain(fastest, problem.graph)


def test_all_grids_are_rows_of_the_table_the_fastest_first() -> None:
    problem = make_problem(12, 4, 16)
    plan, rows = plan_and_choices(constrained(problem, simplicity=0.02))
    found = {Grid(row.num_stages, len(row.stages[0].ranks), row.num_micro_batches) for row in rows}
    assert len(found) == len(rows) and found == set(grids_of(problem, 12))
    assert [row.predicted_seconds for row in rows] == sorted(row.predicted_seconds for row in rows)
    assert plan.predicted_seconds <= rows[0].predicted_seconds * 1.02
    for row in rows:
        assert len({len(stage.ranks) for stage in row.stages}) == 1
        assert row.micro_batch_size * row.num_micro_batches == pytest.approx(16)
        assert max(row.rank_bytes()) == max(stage.memory_bytes for stage in row.stages)


def test_rows_are_what_the_user_decided_and_what_fits() -> None:
    rows = plan_and_choices(make_problem(6, 4, 8, num_stages=2, num_micro_batches=4))[1]
    assert [(row.num_stages, row.num_micro_batches) for row in rows] == [(2, 4)]
    everything = plan_and_choices(make_problem(6, 4, 8))[1]
    limit = sorted(max(row.rank_bytes()) for row in everything)[len(everything) // 2]
    fitting = plan_and_choices(make_problem(6, 4, 8, memory_bytes=limit))[1]
    assert fitting and all(max(row.rank_bytes()) <= limit for row in fitting)


def test_micro_batches_of_one_sample_are_a_row_where_replicas_do_not_divide_the_batch() -> None:
    """13 micro-batches for two replicas need less memory than 12, of which one holds two samples."""
    problem = make_problem(8, 4, 13, num_stages=2, num_replicas=2)
    counts = [grid.num_micro_batches for grid in grids_of(problem, 8)]
    assert counts == [2, 4, 8, 12, 13]
    plan, rows = plan_and_choices(with_memory(problem, 8.8e5))
    assert plan.num_micro_batches == 13 and [row.num_micro_batches for row in rows] == [13]


def test_table_has_a_row_for_each_stage_and_fits_80_columns() -> None:
    plan = make_plan(make_problem(8, 4, 12, num_stages=3))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(plan_table(plan, [module_range(stage.blocks, make_graph(8)) for stage in plan.stages]))
    text = console.export_text()
    assert "3 stages" in text
    assert f"{plan.stages[1].forward_seconds * 1e3:.3g} + {plan.stages[1].backward_seconds * 1e3:.3g}" in text
    assert readable(plan.stages[2].memory_bytes) in text
    assert "…" not in text


@pytest.mark.parametrize(("num_stages", "more"), [(3, ""), (6, "; 2 more stages")])
def test_a_plan_is_summed_up_in_two_lines(num_stages: int, more: str) -> None:
    problem = make_problem(8, num_stages, 12, num_stages=num_stages)
    plan = make_plan(problem)
    first, second = summary(plan, problem.graph).splitlines()
    start = f"{num_stages} stages, {plan.num_micro_batches} micro-batches, {plan.schedule}: predicted "
    assert first == f"{start}{seconds(plan.predicted_seconds)} a step"
    assert f"rank 1: {module_range(plan.stages[1].blocks, problem.graph)}, " in second and second.endswith(more)


def test_explained_time_adds_up_to_the_step() -> None:
    problem = make_problem(8, 3, 12, num_stages=3, skips=2)
    text = explain(make_plan(problem), problem.graph)
    shares = [float(line.split()[1].rstrip("%")) for line in text.splitlines() if "mean over ranks" in line]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "\nbound " in text
