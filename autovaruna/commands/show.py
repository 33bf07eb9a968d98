"""Prints a saved deployment as a table, or as JSON."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from autovaruna.commands.printing import add_json, show, show_json
from autovaruna.log import readable
from autovaruna.planner.deployment import Deployment, load
from autovaruna.planner.infeasible import ranks_text
from autovaruna.planner.table import seconds

EXAMPLE = "autovaruna show deployment.json"
_COLUMNS = ("stage", "starts at", "ranks", "parameters", "forward", "backward", "memory", "recompute", "in flight")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the file."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a deployment, as deployment.json")
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Prints a saved deployment as a table."""
    deployment = load(options.file)
    if options.json:
        show_json(record_of(deployment))
    else:
        show(table_of(deployment))


def record_of(deployment: Deployment) -> dict[str, object]:
    """Returns a deployment for programs, in bytes and seconds."""
    plan, cuts = deployment.plan, ("", *deployment.cuts)
    stages = [asdict(stage) | {"starts_at": cut} for stage, cut in zip(plan.stages, cuts, strict=True)]
    return asdict(plan) | {"stages": stages, "valid_for": asdict(deployment.fingerprint)}


def table_of(deployment: Deployment) -> Table:
    """Returns the stages of a deployment as a table, with what it is valid for below."""
    plan, valid_for = deployment.plan, deployment.fingerprint
    title = f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size:.3g} samples, {plan.schedule}"
    title += f": predicted {seconds(plan.predicted_seconds)} a step"
    title += "" if plan.is_measured else ", from a roofline, nothing was measured"
    caption = f"Valid for graph {valid_for.graph}, {valid_for.num_ranks} ranks, {valid_for.device}"
    table = Table(*(Column(name, overflow="fold") for name in _COLUMNS), title=title, caption=caption)
    for number, (stage, cut) in enumerate(zip(plan.stages, ("(the first block)", *deployment.cuts), strict=True)):
        cells = (
            *(str(number), cut, ranks_text(stage.ranks), readable(stage.parameter_bytes)),
            *(seconds(stage.forward_seconds), seconds(stage.backward_seconds), readable(plan.bytes_of(stage))),
            *("yes" if stage.needs_recompute else "no", str(stage.in_flight)),
        )
        table.add_row(*map(Text, cells))
    return table
