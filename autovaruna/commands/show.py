"""Prints a saved deployment as a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table
from rich.text import Text

from autovaruna.commands.printing import show
from autovaruna.planner.deployment import Deployment, load
from autovaruna.planner.infeasible import ranks_text, readable
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.planner.table import seconds

HELP = "print a saved deployment as a table"
_COLUMNS = ("stage", "starts at", "ranks", "parameters", "forward", "backward", "memory", "recompute", "in flight")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the file."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a deployment, as deployment.json")


def run(options: argparse.Namespace) -> None:
    """Prints a saved deployment as a table."""
    show(table_of(load(options.file)))


def table_of(deployment: Deployment) -> Table:
    """Returns the stages of a deployment as a table, with what it is valid for below."""
    plan, valid_for = deployment.plan, deployment.fingerprint
    title = f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size:.3g} samples, {plan.schedule}"
    title += f": predicted {seconds(plan.predicted_seconds)} a step"
    title += "" if plan.is_measured else ", from a roofline, nothing was measured"
    table = Table(
        title=title, caption=f"Valid for graph {valid_for.graph}, {valid_for.num_ranks} ranks, {valid_for.device}"
    )
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for number, (stage, cut) in enumerate(zip(plan.stages, ("(the first block)", *deployment.cuts), strict=True)):
        table.add_row(*(Text(cell) for cell in (str(number), cut, *_cells(plan, stage))))
    return table


def _cells(plan: Plan, stage: StagePlan) -> tuple[str, ...]:
    return (
        ranks_text(stage.ranks),
        readable(stage.parameter_bytes),
        seconds(stage.forward_seconds),
        seconds(stage.backward_seconds),
        readable(plan.bytes_of(stage)),
        "yes" if stage.needs_recompute else "no",
        str(stage.in_flight),
    )
