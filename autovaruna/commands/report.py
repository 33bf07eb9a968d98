"""Shows a plan: its stages, what it costs and why, a step as text or picture; and saves it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich import box
from rich.table import Table

from autovaruna.commands.planning import Planning
from autovaruna.commands.plot import plot
from autovaruna.commands.printing import columns, show
from autovaruna.planner import explain, pipeline_of, plan_table, policy_of
from autovaruna.planner.choices import Choice
from autovaruna.planner.deployments.deployment_file import save
from autovaruna.planner.infeasible import readable
from autovaruna.planner.predicting.folding import short_enough
from autovaruna.planner.records import Plan
from autovaruna.planner.table import seconds
from autovaruna.schedule import Pipeline, simulate
from autovaruna.schedule.timeline import render

_MOST_ROWS = 24


def report(planning: Planning, options: argparse.Namespace) -> None:
    """Plans, and shows and saves what the options ask for.

    Raises:
        AutoVarunaError: there is no plan, or a file cannot be written.
    """
    if options.table:
        show(choices_table(planning.choices))
    graph, plan = planning.traced.graph, planning.plan
    table = plan_table(plan, graph)
    if not plan.is_measured:
        table.title = f"{table.title} (roofline)"
    show(table)
    show(explain(plan, graph))
    pipeline = short_enough(pipeline_of(plan, graph))
    simulation = simulate(pipeline, policy_of(plan.schedule))
    rows = shown_ranks(pipeline)
    longer = len(str(plan.num_ranks)) - len(str(pipeline.num_ranks))
    drawing = render(simulation, columns=columns() - longer)
    show("\n" + timeline(drawing, rows, plan.num_ranks, _names(plan, pipeline)))
    for assumption in planning.assumptions:
        show(f"note: {assumption}")
    if options.output:
        save(options.output, planning.deployment)
        show(f"saved {options.output}")
    if options.plot:
        plot(simulation, rows, options.plot)
        show(f"drew {options.plot}")


def choices_table(choices: Sequence[Choice]) -> Table:
    """Returns choices as a table, in their order."""
    table = Table(title="choices, fastest first", box=box.SIMPLE_HEAD)
    for name in ("stages", "replicas", "micro-batch", "micro-batches", "step", "samples/s", "memory", "recompute"):
        table.add_column(name, justify="right")
    for choice in choices:
        stages = choice.plan.stages
        table.add_row(
            str(choice.num_stages),
            str(choice.num_replicas),
            str(choice.micro_batch_size),
            str(choice.plan.num_micro_batches),
            seconds(choice.step_seconds),
            f"{choice.samples_per_second:.4g}",
            readable(choice.memory_bytes),
            f"{sum(stage.needs_recompute for stage in stages)} of {len(stages)}",
        )
    return table


def shown_ranks(plan: Plan | Pipeline) -> list[int]:
    """Returns the ranks to draw: all, or of many the first replica of each stage, or of some stages."""
    used = sorted({rank for stage in plan.stages for rank in stage.ranks})
    if len(used) <= _MOST_ROWS:
        return used
    firsts = list(dict.fromkeys(stage.ranks[0] for stage in plan.stages))
    if len(firsts) <= _MOST_ROWS:
        return firsts
    return [firsts[round(k * (len(firsts) - 1) / (_MOST_ROWS - 1))] for k in range(_MOST_ROWS)]


def timeline(drawing: str, rows: Sequence[int], num_ranks: int, names: Sequence[int] = ()) -> str:
    """Returns some rows of a drawing, with its legend, and what was left out.

    Args:
        drawing: with a row for each simulated rank.
        rows: those to keep.
        num_ranks: of the plan.
        names: the rank that each row of the drawing is about; empty: all in their order.
    """
    lines = drawing.splitlines()
    kept = [_named(lines[row], names[row] if names else row, max(names, default=0)) for row in rows]
    kept += lines[len(names) or num_ranks :]
    if len(rows) < num_ranks:
        kept.append(f"{len(rows)} of {num_ranks} ranks are drawn: the first replicas of stages")
    return "\n".join(kept)


def _named(line: str, rank: int, greatest: int) -> str:
    """Returns a row of a drawing with the rank's own name."""
    return f"{f'rank {rank}':<{len(f'rank {greatest}')}} |{line.split('|', 1)[1]}" if greatest else line


def _names(plan: Plan, pipeline: Pipeline) -> list[int]:
    """Returns the plan's rank for each rank of a pipeline that is made of every n-th replica; empty: it is all."""
    if pipeline.num_ranks == plan.num_ranks:
        return []
    parts = len(plan.stages[0].ranks) // len(pipeline.stages[0].ranks)
    return [rank for stage in plan.stages for rank in stage.ranks[::parts]]
