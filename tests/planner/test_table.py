"""What a person is shown of a plan."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autovaruna.log import readable
from autovaruna.planner.search import make_plan
from autovaruna.planner.table import explain, module_range, plan_table, seconds, summary
from tests.planner.cases import make_graph, make_problem


def test_table_has_a_row_for_each_stage_and_fits_80_columns() -> None:
    plan = make_plan(make_problem(8, 4, 12, num_stages=3))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(plan_table(plan, make_graph(8)))
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
    assert "proven bound" in text
